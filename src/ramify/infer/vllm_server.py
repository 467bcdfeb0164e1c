"""A stock `vllm serve` as a child process. Ramify does not patch it; it only sets flags.

    NEW -> STARTING -> READY -> STOPPED
               |                  ^
               +------------------+   it exited, or was not ready in time: the error shows the end of its log

vLLM runs in its own Python environment, so that its dependencies do not conflict with ours. It is stopped with all
processes that it started, also if this process is killed. Once it runs, everything goes through HTTP:
`ramify.infer.client` samples from it and updates its weights.
"""

import asyncio
import os
import socket
from enum import Enum
from pathlib import Path
from typing import Self

from ramify.core.async_calls import AsyncService
from ramify.core.errors import DeadlineExceeded, ProviderError
from ramify.infer.client.http_client import HttpClient, RequestFailed, send_request
from ramify.infer.config import ServerConfig, VLLMConfig
from ramify.model.resolve import resolve_model_path
from ramify.model.weights_manifest import MANIFEST_FILE, Manifest
from ramify.processes.child import ChildProcess, wait_until_ready
from ramify.processes.exit import EXIT_NOT_STARTED, describe_exit
from ramify.processes.log import ProcessLog
from ramify.trace.version import PolicyVersion

POLL_INTERVAL = 0.25  # seconds
RESPONSE_TIMEOUT = 5.0  # seconds for a response of the starting server


class VLLMServerState(Enum):
    """Where the server is in its life cycle."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class VLLMServer(AsyncService):
    """One vLLM server. Start it once, close it once. `log` is the file of its output."""

    def __init__(self, model: str, config: VLLMConfig, server: ServerConfig) -> None:
        self.model_name, self.config, self.server = model, config, server
        self.path = resolve_model_path(model)
        is_published = (self.path / MANIFEST_FILE).is_file()
        self.version = Manifest.read(self.path).version if is_published else PolicyVersion(Path(model).name)
        self.port = server.port or _find_free_port(server.host)
        self.log = ProcessLog(Path(config.log_file))
        self.state = VLLMServerState.NEW
        self._child = ChildProcess(stop_timeout=server.shutdown_timeout)

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
            *("--dtype", config.dtype, "--gpu-memory-utilization", str(config.memory_fraction)),
            "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching",
            *(() if config.max_model_len is None else ("--max-model-len", str(config.max_model_len))),
            *(() if config.max_running_requests is None else ("--max-num-seqs", str(config.max_running_requests))),
            *(("--tensor-parallel-size", str(config.tensor_parallel)) if config.tensor_parallel > 1 else ()),
            *(("--enforce-eager",) if config.enforce_eager else ()),
            *(() if has_tokenizer else ("--skip-tokenizer-init",)),  # token ids need none
            *config.extra_args,
        ]

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        ramify_env = {
            "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints for pause, resume, weights and cache
            "VLLM_CPU_KVCACHE_SPACE": str(self.config.cpu_kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **ramify_env, **self.config.extra_env}

    async def start(self) -> Self:
        """Start the process; wait until it is healthy and has the version of its weights."""
        if self.state is not VLLMServerState.NEW:
            raise ProviderError(f"a vLLM server starts once; this one is {self.state.value}")
        self.state = VLLMServerState.STARTING
        try:
            with self.log.open() as log:
                await self._child.spawn(self.build_command(), log.fileno(), env=self.build_environment())
            await self._wait_until_ready()
        except BaseException:
            await self.close()
            raise
        self.state = VLLMServerState.READY
        return self

    async def wait(self) -> None:
        """Return when the server was stopped; raise ProviderError if it exits by itself."""
        if self.state is VLLMServerState.READY:
            code = await self._child.wait()
            if self.state is VLLMServerState.READY:
                raise self._build_exit_error(code)

    async def close(self) -> None:
        """Stop the process and all that it started: by SIGTERM, after `server.shutdown_timeout` seconds by SIGKILL."""
        self.state = VLLMServerState.STOPPED
        await self._child.stop()

    async def _wait_until_ready(self) -> None:
        timeout = self.config.startup_timeout
        async with HttpClient(self.url, connect_timeout=RESPONSE_TIMEOUT, max_connections=1) as http:
            try:
                is_ready = await wait_until_ready(
                    self._child.poll, lambda: self._is_ready(http), timeout=timeout, poll_interval=POLL_INTERVAL
                )
            except TimeoutError:
                message = f"vLLM did not answer within {timeout:g} s; {self.log.describe_tail()}"
                raise DeadlineExceeded(message) from None
            if not is_ready:
                raise self._build_exit_error(await self._child.wait())

    async def _is_ready(self, http: HttpClient) -> bool:
        """Return whether the server is healthy and has accepted the version of its weights."""
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                if (await http.request("GET", "/health")).status != 200:
                    return False
                await send_request(http, "POST", "/update_weight_version", {"new_version": str(self.version)})
                return True
        except (RequestFailed, TimeoutError):
            return False

    def _build_exit_error(self, code: int) -> ProviderError:
        if code == EXIT_NOT_STARTED:
            return ProviderError(f"inference.python = {self.config.python!r}: {self.log.tail()}")
        return ProviderError(f"vLLM {describe_exit(code)}; {self.log.describe_tail()}")


def _find_free_port(host: str) -> int:
    """Return a port that is free now; vLLM binds it a moment later."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
