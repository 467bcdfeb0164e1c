"""The native server with a model that is made to say a script.

    python -m tests.support.scripted_server MODEL CALLS ENGINE MODULE:FUNCTION [ARGUMENT ...]

Everything is the real engine except the choice of the next token: it is the next token of the reply that the function
returns, with the logprob that the model gives it. So rollouts go the way that the script wants, while everything that
is trained is real. The function gets the arguments, the text of a prompt and the seed of the request. Every finished
call is appended to the file CALLS with its prompt, tokens and logprobs, so that a test can compare traces with what the
engine really saw. ENGINE is an `EngineConfig` as JSON.
"""

import asyncio
import contextlib
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ramify.infer.config import EngineConfig, ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import EngineRequest
from ramify.infer.scheduler import ScheduledChunk
from ramify.infer.server import serve
from ramify.model.load import load_engine_model
from ramify.model.render import Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.trace.version import PolicyVersion
from tests.clients.run import wait_for_address

STOP_DEADLINE = 60  # seconds

Script = Callable[[str, int], str]
"""Returns the reply to the text of a prompt and the seed of its request."""


class ScriptedCore(EngineCore):
    """An engine core that samples the tokens of a script. The logprobs come from the model."""

    def __init__(self, *args: Any, script: Script, renderer: Renderer, calls: Path) -> None:
        super().__init__(*args)
        self._script, self._renderer, self._calls_file = script, renderer, calls
        self._reply_ids: dict[EngineRequest, list[int]] = {}

    def _can_launch(self, chunks: list[ScheduledChunk]) -> bool:
        return False  # a GPU would sample by itself

    def _sample(self, requests: list[EngineRequest], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        temperatures = torch.tensor([request.sampling_params.temperature or 1.0 for request in requests])
        logprobs = (logits.float() / temperatures.unsqueeze(-1)).log_softmax(-1)
        tokens = [self._get_reply(request)[len(request.logprobs)] for request in requests]
        return tokens, [float(logprobs[row, token]) for row, token in enumerate(tokens)]

    def _append_tokens(
        self, requests: list[EngineRequest], tokens: list[int], logprobs: list[float], version: PolicyVersion
    ) -> None:
        super()._append_tokens(requests, tokens, logprobs, version)
        for request in requests:
            if request.finish_reason is not None:
                self._log(request)
                del self._reply_ids[request]

    def _get_reply(self, request: EngineRequest) -> list[int]:
        if request not in self._reply_ids:
            self._reply_ids[request] = self._encode_reply(request)
        return self._reply_ids[request]

    def _encode_reply(self, request: EngineRequest) -> list[int]:
        tokenizer = self._renderer.tokenizer
        reply = self._script(tokenizer.decode(request.prompt_token_ids), request.seed)
        return [*tokenizer.encode(reply, continues_text=True).ids.tolist(), self._renderer.stop_ids[0]]

    def _log(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        fields = {
            "prompt": request.prompt_token_ids,
            "tokens": request.token_ids[num_prompt:],
            "logprobs": request.logprobs,
            "cached": request.num_cached_tokens,
        }
        with self._calls_file.open("a") as file:
            file.write(json.dumps(fields) + "\n")


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """A running server: its address, the file of its calls, and the file of its output."""

    url: str
    calls: Path
    log: Path


@contextlib.contextmanager
def run_scripted_server(
    folder: Path,
    script: str,
    *arguments: str,
    model: str = "tiny",
    engine: EngineConfig | None = None,
    name: str = "engine",
) -> Iterator[ScriptedServer]:
    """Run the server with the function `module:name` as the script; its files in `folder` begin with `name`."""
    calls, log = folder / f"{name}.calls.jsonl", folder / f"{name}.txt"
    calls.write_text("")
    config = (engine or EngineConfig(threads=1)).model_dump_json(exclude_defaults=True)
    command = [sys.executable, "-m", "tests.support.scripted_server", model, str(calls), config, script, *arguments]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield ScriptedServer(wait_for_address(process, log), calls, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()


def main(model: str, calls: str, engine: str, script: str, *arguments: str) -> None:
    """Serve on a free port until a signal; print the address."""
    config, path = EngineConfig.model_validate_json(engine), resolve_model_path(model)
    torch.set_num_threads(config.threads or 2)
    module, _, name = script.partition(":")
    core = ScriptedCore(
        load_engine_model(path, dtype=config.dtype, device=config.device),
        config,
        PolicyVersion(Path(model).name),
        script=functools.partial(getattr(importlib.import_module(module), name), *arguments),
        renderer=(renderer := load_renderer(path)),
        calls=Path(calls),
    )
    asyncio.run(serve(Engine(core), name=model, config=ServerConfig(port=0), renderer=renderer))


if __name__ == "__main__":
    main(*sys.argv[1:])
