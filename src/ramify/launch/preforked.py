"""`python -m ramify.launch.preforked PARENT_PID MODULES`: a fork server that imports shared modules once.

    supervisor ==request socket==> fork server ---> watcher ---> command

An engine and a trainer spend their first seconds importing the same modules. The fork server imports them once and
forks each process from itself. A forked process is like a started one: it has a watcher, its own session, its own
process title and the given standard streams, and it sends the same messages to the supervisor. If the fork server is
missing or dead, the supervisor starts processes directly.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.launch.parent_watch import die_with_parent, run_watched

if TYPE_CHECKING:
    from ramify.launch.process import ProcessSpec

RAMIFY_COMMAND = (sys.executable, "-m", "ramify")  # only these commands can be forked
MAX_MESSAGE_BYTES = 1 << 16  # of a request
TITLE_PADDING = " " * 1024  # an argument that leaves room for the titles of the forked processes


class PreforkClient:
    """The supervisor's connection to the fork server."""

    def __init__(self, request_socket: socket.socket, spec_names: Sequence[str]) -> None:
        self._request_socket, self._spec_names = request_socket, spec_names

    def request_fork(
        self, spec: "ProcessSpec", stop_timeout: float, control_socket: socket.socket, log_fd: int
    ) -> bool:
        """Request a process whose watcher uses `control_socket`; return False if the server cannot fork it."""
        if spec.name not in self._spec_names:
            return False
        request = {"stop_timeout": stop_timeout, "command": spec.command, "modules": spec.preload_modules}
        try:
            socket.send_fds(self._request_socket, [json.dumps(request).encode()], [control_socket.fileno(), log_fd])
        except OSError:  # the fork server is dead
            return False
        return True


@contextlib.contextmanager
def start_prefork_server(specs: Sequence["ProcessSpec"]) -> Generator[PreforkClient | None]:
    """Start a fork server for the processes that preload modules, if there are two or more with the same environment.

    Yield a client of the server, or None without one.
    """
    preloadable = [spec for spec in specs if spec.preload_modules and spec.command[:3] == RAMIFY_COMMAND]
    if len(preloadable) < 2 or any(spec.env != preloadable[0].env for spec in preloadable):
        yield None
        return
    arguments = (str(os.getpid()), *preloadable[0].preload_modules, TITLE_PADDING)
    parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with parent_socket, child_socket:
        parent_socket.setblocking(False)
        server = subprocess.Popen(
            [sys.executable, "-m", "ramify.launch.preforked", *arguments],
            stdin=child_socket.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a failing import is reported when the process is started directly
            env={**os.environ, **preloadable[0].env},
            start_new_session=True,
        )
        child_socket.close()
        try:
            yield PreforkClient(parent_socket, [spec.name for spec in preloadable])
        finally:
            server.kill()
            server.wait()


def main(parent_pid: int, modules: Sequence[str]) -> int:
    """Import `modules`, then fork once per request. Only the forked child returns, with the exit code of its command.

    The server itself returns 0 when the supervisor closes the socket.
    """
    die_with_parent(parent_pid)
    gc.disable()  # modules are not garbage, and collections take a fifth of the time
    _import_modules(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children; nobody waits for them here
    with socket.socket(fileno=0) as request_socket:
        while True:
            data, fds, _, _ = socket.recv_fds(request_socket, MAX_MESSAGE_BYTES, 2)
            if not data:
                return 0
            request = json.loads(data)
            _import_modules(request["modules"])
            if os.fork() == 0:
                break
            for fd in fds:
                os.close(fd)
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, fd in enumerate((*fds, fds[-1])):  # control socket, log, log
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    command, stop_timeout = request["command"], request["stop_timeout"]
    _set_process_title([sys.executable, "-m", "ramify.launch.parent_watch", str(stop_timeout), *command])
    return run_watched(lambda: _run_command(command), stop_timeout=stop_timeout)


def _import_modules(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # keeps the collector from writing to pages that forked processes share


def _run_command(command: Sequence[str]) -> int:
    from ramify.cli import main

    _set_process_title(command)
    sys.argv = ["ramify", *command[len(RAMIFY_COMMAND) :]]
    return main()


def _set_process_title(argv: Sequence[str]) -> None:
    """Overwrite the command line of this process, which `ps` shows, in the memory where the kernel reads it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted from the state
    title = "\0".join(argv).encode()[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:-1]))
