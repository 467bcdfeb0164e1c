"""A stock `vllm serve` as a child: started, watched, stopped. No patches; what Ramify needs from it are flags.

    NEW -> STARTING -> READY -> STOPPED
               |                  ^
               +------------------+   it exited, or was not ready in time: the end of its log says why

vLLM runs from an interpreter of its own, so that its pins do not meet ours. Its processes form one group, which ends as
a whole. Afterwards everything goes through HTTP: `ramify.client` samples from it and gives it weights.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Self

import httpx

from ramify.errors import DeadlineExceeded, ProviderError
from ramify.infer.config import ServerConfig, VLLMConfig
from ramify.model.manifest import MANIFEST_FILE, Manifest
from ramify.model.resolve import resolve_model_path
from ramify.model.version import PolicyVersion

LOG_TAIL_LINES = 30  # lines of the log that a failure shows
POLL_INTERVAL = 0.25  # seconds between two looks


class VLLMServerState(Enum):
    """Where the server is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class VLLMServer:
    """One vLLM server. Start it once, stop it once."""

    def __init__(self, model: str, config: VLLMConfig, server: ServerConfig) -> None:
        self.model_name, self.config, self.server = model, config, server
        self.path = resolve_model_path(model)
        published = (self.path / MANIFEST_FILE).is_file()
        self.version = Manifest.read(self.path).version if published else PolicyVersion(Path(model).name)
        self.port = server.port or _find_free_port(server.host)
        self.log_path = Path(config.log)
        self.state = VLLMServerState.NEW
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.server.host}:{self.port}"

    def build_command(self) -> list[str]:
        """The command line."""
        config = self.config
        words = [str(Path(config.python).expanduser()), "-m", "vllm.entrypoints.cli.main", "serve", str(self.path)]
        words += ["--served-model-name", self.server.model_name or self.model_name]
        words += ["--host", self.server.host, "--port", str(self.port)]
        words += ["--enable-scale-out"]  # the generate endpoint
        words += ["--logprobs-mode", "processed_logprobs"]  # after temperature; the default is before
        words += ["--generation-config", "vllm"]  # the model's own defaults must not change what is sampled
        words += ["--scheduling-policy", "priority"]  # without it a priority is an error
        words += ["--enable-prompt-tokens-details"]  # how much of a prompt was cached
        words += ["--dtype", config.dtype, "--gpu-memory-utilization", str(config.memory)]
        words += ["--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching"]
        if config.max_model_len is not None:
            words += ["--max-model-len", str(config.max_model_len)]
        if config.max_running is not None:
            words += ["--max-num-seqs", str(config.max_running)]
        if config.eager:
            words += ["--enforce-eager"]
        if not (self.path / "tokenizer.json").is_file():
            words += ["--skip-tokenizer-init"]  # token ids need none
        return [*words, *config.args]

    def build_environment(self) -> dict[str, str]:
        """The variables it runs with."""
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weights, cache: endpoints of the development mode
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_cache),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **ours, **self.config.env}

    async def start(self) -> Self:
        """Start it and wait until it answers and its weights have a name."""
        if self.state is not VLLMServerState.NEW:
            raise ProviderError(f"a vLLM server starts once; this one is {self.state.value}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self.build_command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.build_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                said = f"inference.python = {self.config.python!r} cannot be started: {error.strerror}"
                raise ProviderError(said) from error
        self.state = VLLMServerState.STARTING
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise
        self.state = VLLMServerState.READY
        return self

    async def wait(self) -> None:
        """Return when it has been stopped; raise if it ends by itself."""
        while self.state is VLLMServerState.READY:
            self._raise_if_exited()
            await asyncio.sleep(POLL_INTERVAL)

    async def stop(self) -> None:
        """End the whole group: asked first, killed after `server.shutdown` seconds."""
        process, self.state = self._process, VLLMServerState.STOPPED
        if process is None:
            return
        self._signal_group(process, signal.SIGTERM)
        end = time.monotonic() + self.server.shutdown
        try:
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.05)
        finally:  # even if we are told to hurry
            self._signal_group(process, signal.SIGKILL)  # also what the first process has left behind
            process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def read_log_tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log_path.open(errors="replace") as log:
            return "".join(deque(log, LOG_TAIL_LINES))
        return "(no log)"

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.config.start_deadline
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while not await self._is_healthy(http):
                self._raise_if_exited()
                if time.monotonic() > deadline:
                    said = f"vLLM did not answer within {self.config.start_deadline:g} s"
                    raise DeadlineExceeded(f"{said}; the end of {self.log_path}:\n{self.read_log_tail()}")
                await asyncio.sleep(POLL_INTERVAL)
            label = {"new_version": str(self.version)}
            (await http.post("/update_weight_version", json=label)).raise_for_status()

    async def _is_healthy(self, http: httpx.AsyncClient) -> bool:
        try:
            return (await http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    def _raise_if_exited(self) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise ProviderError(
                f"vLLM ended with exit code {code}; the end of {self.log_path}:\n{self.read_log_tail()}"
            )

    @staticmethod
    def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _find_free_port(host: str) -> int:
    """A port nobody listens on now; vLLM binds it a moment later."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
