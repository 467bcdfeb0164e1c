"""A local OpenEnv server: a process that is started when it is first needed, and again after it has ended."""

import asyncio
import atexit
import socket
import subprocess
from collections.abc import Sequence

from ramify.core.errors import EnvironmentFault
from ramify.processes.wire.address import is_listening

POLL_INTERVAL = 0.2  # seconds between two checks for a server that does not listen yet
PORT_PLACEHOLDER = "{port}"


class LocalServer:
    """One process that serves at a free port of this machine. Rollouts of one worker share it."""

    def __init__(self, command: Sequence[str], *, startup_timeout: float) -> None:
        self._command, self._startup_timeout = list(command), startup_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._base_url, self._lock = "", asyncio.Lock()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The process id; 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    async def get_base_url(self) -> str:
        """Return the address of the running server; start it if it does not run. Raises EnvironmentFault."""
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                await self._start()
            return self._base_url

    async def _start(self) -> None:
        port = _find_free_port()
        command = [argument.replace(PORT_PLACEHOLDER, str(port)) for argument in self._command]
        self._base_url = f"http://127.0.0.1:{port}"
        try:
            self._process = process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise EnvironmentFault(f"the OpenEnv server {command[0]!r} cannot be started: {error}") from error
        try:
            async with asyncio.timeout(self._startup_timeout):
                while not await is_listening(self._base_url):
                    if process.poll() is not None:
                        raise EnvironmentFault(f"the OpenEnv server exited with {process.returncode} while it started")
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            self.stop()
            raise EnvironmentFault(
                f"the OpenEnv server did not listen on port {port} within {self._startup_timeout:g} s: its command "
                f"must contain {PORT_PLACEHOLDER}"
            ) from None

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
