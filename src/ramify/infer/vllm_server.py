"""A stock `vllm serve` as a child process. Ramify does not patch it; it only sets flags.

    NEW -> STARTING -> READY -> STOPPED
               |                  ^
               +------------------+   it exited, or was not ready in time: the error shows the end of its log

vLLM runs in its own Python environment, so that its dependencies do not conflict with ours. Its processes form one
process group, which is ended as a whole. Once it runs, everything goes through HTTP: `ramify.client` samples from it
and updates its weights.
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

from ramify.client.http_client import HttpClient, RequestFailed, send_request
from ramify.errors import DeadlineExceeded, ProviderError
from ramify.infer.config import ServerConfig, VLLMConfig
from ramify.model.manifest import MANIFEST_FILE, Manifest
from ramify.model.resolve import resolve_model_path
from ramify.trace.version import PolicyVersion

LOG_TAIL_LINES = 30  # lines of the log that an error shows
POLL_INTERVAL = 0.25  # seconds
RESPONSE_TIMEOUT = 5.0  # seconds for a response of the starting server


class VLLMServerState(Enum):
    """Where the server is in its life cycle."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class VLLMServer:
    """One vLLM server. Start it once, stop it once. `log_path` is the file of its output."""

    def __init__(self, model: str, config: VLLMConfig, server: ServerConfig) -> None:
        self.model_name, self.config, self.server = model, config, server
        self.path = resolve_model_path(model)
        is_published = (self.path / MANIFEST_FILE).is_file()
        self.version = Manifest.read(self.path).version if is_published else PolicyVersion(Path(model).name)
        self.port = server.port or _find_free_port(server.host)
        self.log_path = Path(config.log)
        self.state = VLLMServerState.NEW
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{self.server.host}:{self.port}"

    def build_command(self) -> list[str]:
        """Return the command line."""
        config, server = self.config, self.server
        has_tokenizer = (self.path / "tokenizer.json").is_file()
        return [
            *(str(Path(config.python).expanduser()), "-m", "vllm.entrypoints.cli.main", "serve", str(self.path)),
            *("--served-model-name", server.model_name or self.model_name),
            *("--host", server.host, "--port", str(self.port)),
            "--enable-scale-out",  # the generate endpoint
            *("--logprobs-mode", "processed_logprobs"),  # after temperature; the default is before
            *("--generation-config", "vllm"),  # the model's own defaults must not change what is sampled
            *("--scheduling-policy", "priority"),  # without it a priority is an error
            "--enable-prompt-tokens-details",  # how much of a prompt was cached
            *("--dtype", config.dtype, "--gpu-memory-utilization", str(config.memory)),
            "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching",
            *(() if config.max_model_len is None else ("--max-model-len", str(config.max_model_len))),
            *(() if config.max_running is None else ("--max-num-seqs", str(config.max_running))),
            *(("--enforce-eager",) if config.eager else ()),
            *(() if has_tokenizer else ("--skip-tokenizer-init",)),  # token ids need none
            *config.args,
        ]

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        ramify_env = {
            "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints for pause, resume, weights and cache
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_cache),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **ramify_env, **self.config.env}

    async def start(self) -> Self:
        """Start the process; wait until it is healthy and has the version of its weights."""
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
                message = f"inference.python = {self.config.python!r} cannot be started: {error.strerror}"
                raise ProviderError(message) from error
        self.state = VLLMServerState.STARTING
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise
        self.state = VLLMServerState.READY
        return self

    async def wait(self) -> None:
        """Return when the server was stopped; raise ProviderError if it exits by itself."""
        while self.state is VLLMServerState.READY:
            self._raise_if_exited()
            await asyncio.sleep(POLL_INTERVAL)

    async def stop(self) -> None:
        """End the process group: by SIGTERM, and after `server.shutdown` seconds by SIGKILL."""
        process, self.state = self._process, VLLMServerState.STOPPED
        if process is None:
            return
        self._signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + self.server.shutdown
        try:
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        finally:  # even if this is cancelled
            self._signal_group(process, signal.SIGKILL)  # also processes that the first one left behind
            process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def read_log_tail(self) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError), self.log_path.open(errors="replace") as log:
            return "".join(deque(log, LOG_TAIL_LINES))
        return "(no log)"

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.config.start_deadline
        async with HttpClient(self.url, connect_timeout=RESPONSE_TIMEOUT, max_connections=1) as http:
            while not await self._is_healthy(http):
                self._raise_if_exited()
                if time.monotonic() > deadline:
                    message = f"vLLM did not answer within {self.config.start_deadline:g} s"
                    raise DeadlineExceeded(f"{message}; the end of {self.log_path}:\n{self.read_log_tail()}")
                await asyncio.sleep(POLL_INTERVAL)
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                await send_request(http, "POST", "/update_weight_version", {"new_version": str(self.version)})

    async def _is_healthy(self, http: HttpClient) -> bool:
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                return (await http.request("GET", "/health")).status == 200
        except (RequestFailed, TimeoutError):
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
    """Return a port that is free now; vLLM binds it a moment later."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
