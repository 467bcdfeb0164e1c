"""The streams of programs in containers and hosted sandboxes: unread output is bounded, and every wait ends."""

import asyncio

import pytest

from ramify.core.errors import SandboxError
from ramify.rollout.runtime import hosted
from ramify.rollout.runtime.container_engine import ContainerProcess
from ramify.rollout.runtime.hosted import HostedProcess

LIMIT = 1 << 16
# In place of `docker exec`: drop the options and the name of the container, and run the shell on this machine.
EXEC_HERE = ["sh", "-c", 'while [ "$1" != sh ]; do shift; done; exec "$@"', "exec"]
LINE = b"x" * 4095 + b"\n"
NUM_LINES = 5000


class CountingProcess(ContainerProcess):
    """Counts the bytes that arrive."""

    num_fed = 0

    def feed(self, stream: int, data: bytes) -> None:
        self.num_fed += len(data)
        super().feed(stream, data)


@pytest.mark.process
async def test_container_program_waits_while_its_output_is_not_read():
    async with asyncio.timeout(60):
        process = CountingProcess(LIMIT, None, interactive=True)
        argv = ["sh", "-c", f"yes {LINE.decode().strip()} | head -n {NUM_LINES}; cat >/dev/null"]
        try:
            await process.start(EXEC_HERE, "sandbox", process.build_arguments(argv, "/", has_stdin=True), {}, None)
            await process.wait_started()
            before = -1
            while process.num_fed != before:  # until nothing arrives any more
                before = process.num_fed
                await asyncio.sleep(0.1)
            assert process.num_fed < NUM_LINES * len(LINE) // 10
            for _ in range(NUM_LINES):
                assert await process.read_line(60) == LINE
        finally:
            await process.close()


class SdkProcessStub:
    """A process of the SDK whose program starts, writes some chunks, and then does not answer."""

    def __init__(self, marker: str, chunks: int = 0) -> None:
        self.stderr = self._start(marker)
        self.stdout = self._write(chunks)
        self.is_closed = asyncio.Event()

    async def _start(self, marker):
        yield f"\x1e{marker} started 7\n".encode()

    async def _write(self, chunks):
        for _ in range(chunks):
            yield b"x" * (1 << 20)
            await asyncio.sleep(0)

    async def write_stdin(self, data):
        await asyncio.Event().wait()

    async def wait(self):
        await asyncio.Event().wait()

    async def aclose(self):
        self.is_closed.set()
        await asyncio.Event().wait()


class ClientStub:
    """A client of the SDK that starts such processes."""

    def __init__(self, process):
        self.process = process

    async def open_process(self, sandbox_id, command, *, env):
        return self.process

    async def upload_bytes(self, *args, **kwargs):
        await asyncio.Event().wait()


@pytest.fixture
def short_timeouts(monkeypatch):
    for name in ("CLOSE_TIMEOUT", "EXIT_TIMEOUT", "INPUT_TIMEOUT"):
        monkeypatch.setattr(hosted, name, 0.05)


async def start_hosted(chunks=0, stdin=None):
    process = HostedProcess(LIMIT, None, interactive=stdin is None)
    client = ClientStub(SdkProcessStub(process.marker, chunks))
    args = process.build_arguments(["cat"], "/", has_stdin=True)
    await process.start(client, "sandbox", args, {}, stdin)
    await process.wait_started()
    return process, client.process


async def test_provider_that_does_not_answer_is_a_named_failure(short_timeouts):
    async with asyncio.timeout(60):
        process, _ = await start_hosted()
        with pytest.raises(SandboxError, match=r"cannot be written to in 0\.05 s"):
            await process.write(b"x")
        result = await process.wait(60)
        assert (result.returncode, result.timed_out) == (-9, False)
        assert b"the connection to the sandbox was lost: TimeoutError" in result.stderr
        with pytest.raises(SandboxError, match=r"cannot be closed in 0\.05 s"):
            await process.close()
        with pytest.raises(SandboxError, match=r"cannot be copied to the sandbox in 0\.05 s"):
            await start_hosted(stdin=b"x")


async def test_hosted_program_that_floods_its_output_is_ended(short_timeouts, monkeypatch):
    monkeypatch.setattr(hosted, "MAX_UNREAD_BYTES", 2 << 20)

    async with asyncio.timeout(60):
        process, sdk_process = await start_hosted(chunks=100)
        result = await process.wait(60)
        assert result.returncode == -9
        assert b"more than 2 MiB that were not read" in result.stderr
        assert sdk_process.is_closed.is_set()
        with pytest.raises(SandboxError, match="closed"):
            await process.close()
