"""The native server with a model that is made to say a script.

    python -m tests.agents.scripted_server MODEL SCRIPT LOG

Everything is the real engine except the choice of the next token: it is the next token of the script, with the logprob
that the model gives it. SCRIPT is a JSON file of replies for a program (`tests.agents.scripts`). Every finished call is
appended to LOG with its prompt, tokens and logprobs, so that a test can compare traces with what the engine really saw.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ramify.infer.config import EngineConfig, ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import EngineRequest
from ramify.infer.scheduler import ScheduledChunk
from ramify.infer.server import serve
from ramify.model.load import load_model
from ramify.render import Renderer, load_renderer
from ramify.trace.version import PolicyVersion

NO_TOOLS_REPLY = "A title"  # to a call without tools, such as one that asks for a title


class ScriptedReplies:
    """Chooses the reply to a prompt: by the number of replies in it and, for the first, by the seed of the request."""

    def __init__(self, renderer: Renderer, script: dict[str, Any]) -> None:
        self._renderer = renderer
        self._first_replies: list[str] = script["first_replies"]
        self._later_replies: list[str] = script["later_replies"]

    def encode_reply(self, request: EngineRequest) -> list[int]:
        """Return the tokens of the reply to a request."""
        tokenizer = self._renderer.tokenizer
        prompt = tokenizer.decode(request.prompt_token_ids)
        num_replies = prompt.count("<|im_start|>assistant") - 1
        if "</tools>" not in prompt:
            reply = NO_TOOLS_REPLY
        elif num_replies == 0:
            reply = self._first_replies[request.seed % len(self._first_replies)]
        else:
            reply = self._later_replies[min(num_replies, len(self._later_replies)) - 1]
        return [*tokenizer.encode(reply, continues_text=True).ids.tolist(), self._renderer.stop_ids[0]]


class ScriptedCore(EngineCore):
    """An engine core that samples the tokens of a script. The logprobs are those of the model."""

    def __init__(self, *args: Any, replies: ScriptedReplies, log: Path) -> None:
        super().__init__(*args)
        self._replies, self._log_file = replies, log
        self._reply_ids: dict[EngineRequest, list[int]] = {}

    def _sample(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> list[EngineRequest]:
        requests = [chunk.request for chunk in chunks if chunk.samples_next]
        if not requests:
            return []
        temperatures = torch.tensor([request.sampling_params.temperature or 1.0 for request in requests])
        logprobs = (logits.float() / temperatures.unsqueeze(-1)).log_softmax(-1)
        for row, request in enumerate(requests):
            if request not in self._reply_ids:
                self._reply_ids[request] = self._replies.encode_reply(request)
            token = self._reply_ids[request][len(request.logprobs)]
            request.append_token(token, float(logprobs[row, token]), self.version)
            if request.finish_reason is not None:
                self.counters.finished += 1
                self.scheduler.finish_request(request)
                self._log(request)
                del self._reply_ids[request]
        self.counters.sampled_tokens += len(requests)
        return requests

    def _log(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt_token_ids)
        fields = {
            "prompt": request.prompt_token_ids,
            "tokens": request.token_ids[num_prompt:],
            "logprobs": request.logprobs,
            "cached": request.num_cached_tokens,
        }
        with self._log_file.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def main(model_directory: str, script_file: str, log_file: str) -> None:
    """Serve on a free port until a signal; print the address."""
    torch.set_num_threads(2)
    renderer = load_renderer(Path(model_directory))
    config = EngineConfig(dtype="float32", kv_cache_tokens=400_000, max_num_batched_tokens=2048)
    model = load_model(Path(model_directory), dtype=config.dtype, device=config.device)
    replies = ScriptedReplies(renderer, json.loads(Path(script_file).read_text()))
    version = PolicyVersion(Path(model_directory).name)
    core = ScriptedCore(model, config, version, replies=replies, log=Path(log_file))
    asyncio.run(serve(Engine(core), name=model_directory, config=ServerConfig(port=0), renderer=renderer))


if __name__ == "__main__":
    main(*sys.argv[1:])
