"""The hosted runtime: programs in a sandbox that a provider runs, by way of the SDK `prime-sandboxes`.

    start     a sandbox is created from the image of the task; this takes seconds to minutes
    spawn     the SDK starts a shell in the sandbox, which starts the program
    stop      the sandbox is deleted

The sandbox is on the internet, so its programs reach the gateway only if `gateway_url` names a public address of it.
Sandboxes of a killed process end after `lifetime`, or by `clean`, which finds them by their labels.

The SDK is an extra (`pip install 'ramify[prime]'`) and is imported when a sandbox is needed. This runtime passes the
tests that all runtimes share against a local stand-in for the provider; it was not tested with the provider itself.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import math
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from ramify.core.async_calls import cancel_all
from ramify.core.errors import AgentFailed, ConfigInvalid, RamifyError, SandboxError
from ramify.env.runtime import Capabilities, Capability, ResourceLimits, RuntimeConfig
from ramify.env.task import Task
from ramify.rollout.runtime.config import HostedRuntimeConfig
from ramify.rollout.runtime.owner import get_machine_id, is_owner_alive, make_owner_name
from ramify.rollout.runtime.shell_process import KillFunction, ShellProcess
from ramify.rollout.runtime.shell_runtime import ShellRuntime, replace_address

OPEN_TIMEOUT = 60.0  # seconds for the provider to start a process
CLOSE_TIMEOUT = 30.0  # seconds for the SDK to close a process
EXIT_TIMEOUT = 30.0  # seconds for the exit status after the output has ended
INPUT_TIMEOUT = 120.0  # seconds to copy input of a program to the sandbox
MAX_UNREAD_BYTES = 64 << 20  # of an interactive program; the SDK reads on, whether or not it is read here


class SdkProcess(Protocol):
    """A process of the SDK."""

    stdout: AsyncIterator[bytes]
    stderr: AsyncIterator[bytes]

    async def write_stdin(self, data: bytes) -> None:
        """Write to standard input, which cannot be ended."""

    async def wait(self) -> int:
        """Return the exit status."""
        ...

    async def aclose(self) -> None:
        """Stop the process if it runs, and release the connection."""


class SandboxClient(Protocol):
    """The part of the SDK's client that starts programs."""

    async def open_process(self, sandbox_id: str, command: str, *, env: dict[str, str]) -> SdkProcess:
        """Start a command line."""
        ...

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str, timeout: int
    ) -> object:
        """Write a file."""
        ...


class HostedProcess(ShellProcess):
    """A program of a sandbox whose streams the SDK delivers."""

    can_end_input: ClassVar[bool] = False
    _sdk_process: SdkProcess | None = None
    _copy_task: "asyncio.Task[None] | None" = None

    async def start(
        self,
        client: SandboxClient,
        sandbox_id: str,
        args: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
    ) -> None:
        """Run `sh` with these arguments in a sandbox. Its input is a file, since the SDK cannot end an input."""
        command = shlex.join(["sh", *args])
        if stdin:
            file = f"/tmp/.ramify-{self.marker}"
            async with translate_sdk_errors("the input of a program cannot be copied to the sandbox", INPUT_TIMEOUT):
                await client.upload_bytes(sandbox_id, file, stdin, "stdin", int(INPUT_TIMEOUT))
            command = f"exec 3< {file}; rm -f {file}; {command} <&3 3<&-"
        elif not self.is_interactive:
            command = f"{command} < /dev/null"
        async with translate_sdk_errors("a sandbox did not start a program", OPEN_TIMEOUT):
            self._sdk_process = await client.open_process(sandbox_id, command, env=dict(env))
        copying = self._copy_streams(self._sdk_process)
        self._copy_task = asyncio.create_task(copying, name="copy the streams of a sandbox")

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input."""
        if self._sdk_process is None or self.has_exited or self.is_closed:
            raise BrokenPipeError("the program's standard input is closed")
        async with translate_sdk_errors("a program of the sandbox cannot be written to", INPUT_TIMEOUT):
            await self._sdk_process.write_stdin(data)

    async def close(self) -> None:
        """Release the connection. The SDK ends what is left of the program."""
        self.is_closed = True
        sdk_process, self._sdk_process = self._sdk_process, None
        copy_task, self._copy_task = self._copy_task, None
        try:
            if sdk_process is not None:
                async with translate_sdk_errors("a program of the sandbox cannot be closed", CLOSE_TIMEOUT):
                    await sdk_process.aclose()
        finally:
            if copy_task is not None:
                await cancel_all([copy_task])
            self.feed_eof(1)
            self.feed_eof(2)
            self.set_exit_code(-9)  # unless it is known

    async def _copy_streams(self, sdk_process: SdkProcess) -> None:
        unread = _UnreadOutput()
        self.limit_unread_output(unread)

        async def copy(stream: int, chunks: AsyncIterator[bytes]) -> None:
            async for chunk in chunks:
                self.feed(stream, chunk)
                if stream == 1:
                    unread.add(len(chunk))
            self.feed_eof(stream)

        copies = [
            asyncio.create_task(copy(1, sdk_process.stdout), name="copy the standard output of a sandbox"),
            asyncio.create_task(copy(2, sdk_process.stderr), name="copy the standard error of a sandbox"),
        ]
        try:
            await asyncio.gather(*copies)
            async with asyncio.timeout(EXIT_TIMEOUT):
                self.set_exit_code(await sdk_process.wait())
        except Exception as error:  # noqa: BLE001 - the SDK raises errors of three libraries; the caller asks why
            self.feed(2, f"the connection to the sandbox was lost: {type(error).__name__}: {error}".encode())
            self.feed_eof(1)
            self.set_exit_code(-9)
            with contextlib.suppress(SandboxError):  # whoever closes this process sees it
                async with translate_sdk_errors("a program of the sandbox cannot be closed", CLOSE_TIMEOUT):
                    await sdk_process.aclose()
        finally:
            await cancel_all(copies)


class _UnreadOutput(asyncio.ReadTransport):
    """Counts what arrives while a reader of lines has enough. It cannot pause the SDK, which reads into its memory."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes: int | None = None  # None: the reader keeps up

    def pause_reading(self) -> None:
        """Count from now on."""
        self._num_bytes = 0

    def resume_reading(self) -> None:
        """Count no longer: the reader has caught up."""
        self._num_bytes = None

    def add(self, num_bytes: int) -> None:
        """Count bytes. Raises OSError if too many of them are unread."""
        if self._num_bytes is not None:
            self._num_bytes += num_bytes
            if self._num_bytes > MAX_UNREAD_BYTES:
                raise OSError(f"the program wrote more than {MAX_UNREAD_BYTES >> 20} MiB that were not read")


@contextlib.asynccontextmanager
async def translate_sdk_errors(what: str, timeout: float) -> AsyncGenerator[None]:
    """Limit the time of calls of the SDK, and raise a named error for whatever they raise."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except (RamifyError, BrokenPipeError, asyncio.CancelledError):
        raise
    except TimeoutError as error:
        raise SandboxError(f"{what} in {timeout:g} s") from error
    except Exception as error:
        name = type(error).__name__
        if name == "SandboxOOMError":
            raise AgentFailed(f"{what}: its programs used more memory than the limit") from error
        raise SandboxError(f"{what}: {name}: {error}") from error


SDK = "prime_sandboxes"
MACHINE_LABEL = "ramify-machine-"
OWNER_LABEL = "ramify-owner-"
STOP_TIMEOUT = 60.0  # seconds for the provider to delete a sandbox
MAX_PAGES = 100  # of the provider's list of sandboxes
DEFAULT_CPUS = 1.0
DEFAULT_MEMORY_MB = 1024

_numbers = itertools.count()


class HostedRuntime(ShellRuntime):
    """A runtime whose programs run in a sandbox of Prime Intellect."""

    config: HostedRuntimeConfig

    def __init__(self, config: HostedRuntimeConfig | None = None) -> None:
        config = config or HostedRuntimeConfig()
        super().__init__(config, config.workdir)
        self._client: Any = None
        self._sandbox_id: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Isolation, images and the limits of a virtual machine; the gateway if its public address is configured."""
        available = {Capability.ISOLATION, Capability.IMAGES, Capability.MEMORY_LIMIT, Capability.DISK_LIMIT}
        available.add(Capability.CPU_LIMIT)
        reasons = {
            Capability.PRIVATE_NETWORK: "its sandboxes are on the internet; `allow_hosts` restricts what they reach",
            Capability.PROCESS_LIMIT: "the provider does not limit processes",
            Capability.GATEWAY: "its sandboxes are on the internet; set gateway_url to a public address of the gateway",
        }
        if self.config.gateway_url is not None:
            available.add(Capability.GATEWAY)
        return Capabilities(frozenset(available), reasons)

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if the SDK or the API key is missing, or if the runtime lacks what the task needs."""
        if reason := find_unsupported_reason():
            raise ConfigInvalid(f"the runtime 'hosted' does not work on this machine: {reason}")
        super().check_task(task)

    async def start(self, task: Task) -> None:
        """Create a sandbox and wait until it runs."""
        await asyncio.to_thread(self.check_task, task)
        sdk = _load_sdk()
        if self._sandbox_id is not None or self._client is not None:  # of a start that failed
            await self.stop()
        self._client = sdk.AsyncSandboxClient()
        try:
            async with translate_sdk_errors("a sandbox cannot be started", self.config.start_timeout):
                request = sdk.CreateSandboxRequest(**self._build_request(task))
                sandbox = await self._client.create(request)
                self._sandbox_id = sandbox.id
                await self._client.wait_for_creation(sandbox.id, max_attempts=math.ceil(self.config.start_timeout))
            await self._prepare_workdir(task)
        except BaseException:
            with contextlib.suppress(RamifyError):
                await self.stop()
            raise

    async def expose(self, base_url: str) -> str:
        """Return the URL with the public address of the gateway."""
        if self.config.gateway_url is None:
            raise ConfigInvalid(
                "programs of a hosted sandbox cannot reach the gateway of this machine: set runtime.gateway_url to its "
                "public address, such as a tunnel's"
            )
        return replace_address(base_url, self.config.gateway_url)

    @classmethod
    def clean(cls, config: RuntimeConfig) -> list[str]:
        """Delete the sandboxes of processes of this machine that have ended."""
        if find_unsupported_reason():
            return []
        sdk = _load_sdk()
        try:
            client = sdk.SandboxClient(sdk.APIClient())
            leftovers = [id for id, owner in _iter_owners(client) if not is_owner_alive(owner)]
            for sandbox_id in leftovers:
                client.delete(sandbox_id)
        except Exception as error:
            text = f"hosted sandboxes cannot be listed or deleted: {type(error).__name__}: {error}"
            raise SandboxError(text) from error
        return [f"hosted sandbox {sandbox_id}" for sandbox_id in leftovers]

    def _build_request(self, task: Task) -> dict[str, Any]:
        """Return the fields of the request that creates the sandbox of a task."""
        limits: ResourceLimits = self.get_limits(task)
        owner = make_owner_name(next(_numbers))
        return {
            "name": f"ramify-{owner}",
            "docker_image": task.image or self.config.image,
            "cpu_cores": limits.cpus or DEFAULT_CPUS,
            "memory_gb": (limits.memory_mb or DEFAULT_MEMORY_MB) / 1024,
            "disk_size_gb": None if limits.disk_mb is None else limits.disk_mb / 1024,
            "timeout_minutes": math.ceil(self.config.lifetime / 60),
            "labels": ["ramify", f"{MACHINE_LABEL}{get_machine_id()}", f"{OWNER_LABEL}{owner}"],
            "network_allowlist": self.config.allow_hosts,
        }

    async def _remove_sandbox(self) -> None:
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.close() for process in processes), return_exceptions=True)
        if self._client is not None and self._sandbox_id is not None:
            async with translate_sdk_errors("a sandbox cannot be deleted", STOP_TIMEOUT):
                try:
                    await self._client.delete(self._sandbox_id)
                except _load_sdk().APIError as error:
                    if "HTTP 404" not in str(error):  # it is gone
                        raise
            self._sandbox_id = None
        client, self._client = self._client, None
        if client is not None:
            async with translate_sdk_errors("the connection to the provider cannot be closed", STOP_TIMEOUT):
                await client.aclose()

    def _make_process(
        self, max_output_bytes: int, kill_marked: KillFunction | None, *, interactive: bool
    ) -> HostedProcess:
        if self._sandbox_id is None:
            raise SandboxError("the runtime was stopped or not started; it cannot run anything")
        return HostedProcess(max_output_bytes, kill_marked, interactive=interactive)

    async def _open_shell(
        self, process: ShellProcess, args: Sequence[str], env: Mapping[str, str], stdin: bytes | None
    ) -> None:
        assert isinstance(process, HostedProcess) and self._sandbox_id is not None
        await process.start(self._client, self._sandbox_id, args, env, stdin)

    async def _raise_unreachable(self, reason: str) -> None:
        async with translate_sdk_errors("the sandbox does not answer", STOP_TIMEOUT):
            sandbox = await self._client.get(self._sandbox_id)
        if "OOM" in (sandbox.error_type or ""):
            raise AgentFailed("the sandbox has ended: its programs used more memory than the limit")
        raise SandboxError(f"the sandbox is {sandbox.status} and does not run programs: {reason[-500:]}")


def find_unsupported_reason() -> str | None:
    """Return why there are no hosted sandboxes here, None if there are."""
    if importlib.util.find_spec(SDK) is None:
        return "the package prime-sandboxes is missing: pip install 'ramify[prime]'"
    if not _load_sdk().Config().api_key:
        return "there is no API key: set PRIME_API_KEY"
    return None


def _load_sdk() -> Any:
    return importlib.import_module(SDK)


def _iter_owners(client: Any) -> Iterator[tuple[str, str]]:
    """Yield the ids of the sandboxes that processes of this machine made, with their owners."""
    for page in range(1, MAX_PAGES):
        listing = client.list(labels=[f"{MACHINE_LABEL}{get_machine_id()}"], exclude_terminated=True, page=page)
        for sandbox in listing.sandboxes:
            for label in sandbox.labels:
                if label.startswith(OWNER_LABEL):
                    yield sandbox.id, label.removeprefix(OWNER_LABEL)
        if not listing.has_next:
            return
