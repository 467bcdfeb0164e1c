"""`python -m ramify.processes.prefork PARENT_PID MODULES`: a fork server that imports shared modules once.

    parent ==request socket==> fork server ---> watcher ---> command

An engine and a trainer spend their first seconds importing the same modules, and so do the workers of an env server.
The fork server imports them once and forks each process from itself. A forked process is like a started one: it has a
watcher, its own session, its own process title, the given standard streams, and the environment variables and the
working directory of the parent, and its watcher sends the same messages. If the fork server is missing or dead,
processes are started directly.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.processes.exit import QUICK_EXIT
from ramify.processes.watcher import DESCENDANTS_TIMEOUT, die_with_parent, fork_under_watcher

PYTHON_MODULE = (sys.executable, "-m")  # only commands that start like this can be forked
MAX_MESSAGE_BYTES = 1 << 17  # of a request, which has all environment variables
MAX_FDS = 8  # of a request
TITLE_PADDING = " " * 1024  # an argument that leaves room for the titles of the forked processes
POST_FORK_PREFIXES = ("RAMIFY_", "TMPDIR")  # of variables that are read only after the imports


class PreforkClient:
    """The connection to a fork server, which has imported its modules with the additional variables `import_env`."""

    def __init__(self, request_socket: socket.socket, import_env: Mapping[str, str]) -> None:
        self._request_socket, self._import_env = request_socket, dict(import_env)

    def request_fork(
        self,
        command: Sequence[str],
        modules: Sequence[str],
        env: Mapping[str, str],
        *,
        stop_timeout: float | None,
        fds: Sequence[int],
    ) -> bool:
        """Request a process that has imported `modules`; return False if the server cannot fork it.

        Without `stop_timeout` the command itself forks its watcher. `fds` are the control socket of the watcher, the
        file for the output, and others, whose numbers in the process are appended to the arguments of the command.
        """
        if not is_forkable(command, modules) or get_import_env(env) != self._import_env:
            return False
        request = {
            "stop_timeout": stop_timeout,
            "command": command,
            "modules": modules,
            "env": {**os.environ, **env},
            "directory": str(Path.cwd()),
        }
        message = json.dumps(request).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        try:
            socket.send_fds(self._request_socket, [message], fds)
        except OSError:  # the fork server is dead
            return False
        return True


def is_forkable(command: Sequence[str], modules: Sequence[str]) -> bool:
    """Return whether a command can be forked, and has modules to import before."""
    return bool(modules) and tuple(command[:2]) == PYTHON_MODULE


def get_import_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries may read when they are imported."""
    return {name: value for name, value in env.items() if not name.startswith(POST_FORK_PREFIXES)}


@contextlib.contextmanager
def start_prefork_server(modules: Sequence[str], env: Mapping[str, str]) -> Generator[PreforkClient]:
    """Start a fork server for processes with these modules and additional variables, and yield its client."""
    import_env = get_import_env(env)
    parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with parent_socket, child_socket:
        parent_socket.setblocking(False)
        server = subprocess.Popen(
            [*PYTHON_MODULE, "ramify.processes.prefork", str(os.getpid()), *modules, TITLE_PADDING],
            stdin=child_socket.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a failing import is reported when the process is started directly
            env={**os.environ, **import_env},
            start_new_session=True,
        )
        child_socket.close()
        try:
            yield PreforkClient(parent_socket, import_env)
        finally:
            server.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                server.wait(DESCENDANTS_TIMEOUT)


def main(parent_pid: int, modules: Sequence[str]) -> None:
    """Import `modules`, then fork once per request; each forked child runs its command.

    The server itself returns when its parent closes the socket.
    """
    die_with_parent(parent_pid)
    QUICK_EXIT.register()  # before the modules register their handlers
    gc.disable()  # modules are not garbage, and collections take a fifth of the time
    _import_modules(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children; nobody waits for them here
    with socket.socket(fileno=0) as request_socket:
        while True:
            data, fds, _, _ = socket.recv_fds(request_socket, MAX_MESSAGE_BYTES, MAX_FDS)
            if not data:
                return
            request = json.loads(data)
            _import_modules(request["modules"])
            if os.fork() == 0:
                break
            for fd in fds:
                os.close(fd)
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries may report what is not freed at exit, after the error in the log
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    control_fd, output_fd, *inherited_fds = fds
    for number, fd in enumerate((control_fd, output_fd, output_fd)):
        os.dup2(fd, number)
    os.close(control_fd)
    os.close(output_fd)
    _run_command([*request["command"], *map(str, inherited_fds)], request)


def _run_command(command: Sequence[str], request: Mapping[str, Any]) -> None:
    """Run the command in this process, under a watcher."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    if not sys.flags.safe_path:
        sys.path[0] = request["directory"]  # as `python -m` does
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as in a new process; Python's own generator does so by itself
    if request["stop_timeout"] is not None:
        watcher_arguments = ["ramify.processes.watcher", str(request["stop_timeout"])]
        _set_process_title([*PYTHON_MODULE, *watcher_arguments, *command])
        fork_under_watcher(stop_timeout=request["stop_timeout"])
    _set_process_title(command)
    _, _, module, *arguments = command
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _import_modules(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # keeps the collector from writing to pages that forked processes share


def _set_process_title(argv: Sequence[str]) -> None:
    """Overwrite the command line of this process, which `ps` shows, in the memory where the kernel reads it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted from the state
    title = "\0".join(argv).encode()[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:-1])
