"""`python -m ramify.launch.preforked PARENT MODULES`: loads what several processes need, once, and forks them.

    supervisor ==door==> nursery ---> leash ---> command

An engine and a trainer spend their first seconds on the same modules; on few cores those seconds are the start of the
run, twice. What is forked here is the process that would have been started: on a leash, in a session of its own, under
its own name, with the standard streams it was given. It tells the supervisor what a started one tells, so the nursery
is needed for births alone: without it, or when it has died, processes are started as any others.
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
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.launch.parent_watch import die_with_parent, run_watched

if TYPE_CHECKING:
    from ramify.launch.process import ProcessSpec

RAMIFY_COMMAND = (sys.executable, "-m", "ramify")  # how the commands begin that can be forked
MAX_MESSAGE_BYTES = 1 << 16  # bytes of the longest command
TITLE_PADDING = " " * 1024  # for the names of those that are born


class PreforkClient:
    """The supervisor's end of the door."""

    def __init__(self, request_socket: socket.socket, spec_names: Sequence[str]) -> None:
        self._request_socket, self._spec_names = request_socket, spec_names

    def request_fork(
        self, spec: "ProcessSpec", stop_timeout: float, control_socket: socket.socket, log_fd: int
    ) -> bool:
        """Ask for a birth, on a leash that ends with `line`; False where there will be none."""
        if spec.name not in self._spec_names:
            return False
        told = json.dumps({"patience": stop_timeout, "command": spec.command, "loads": spec.preload_modules}).encode()
        try:
            socket.send_fds(self._request_socket, [told], [control_socket.fileno(), log_fd])
        except OSError:  # it is gone
            return False
        return True


@contextlib.contextmanager
def start_prefork_server(specs: Sequence["ProcessSpec"]) -> Iterator[PreforkClient | None]:
    """A nursery for those that load the same and see the same, where there are two at least."""
    preloadable = [entry for entry in specs if entry.preload_modules and entry.command[:3] == RAMIFY_COMMAND]
    if len(preloadable) < 2 or any(entry.env != preloadable[0].env for entry in preloadable):
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ramify.launch.preforked",
                str(os.getpid()),
                *preloadable[0].preload_modules,
                TITLE_PADDING,
            ],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # who cannot load something says so when it is started by itself
            env={**os.environ, **preloadable[0].env},
            start_new_session=True,
        )
        theirs.close()
        try:
            yield PreforkClient(ours, [entry.name for entry in preloadable])
        finally:
            child.kill()
            child.wait()


def main(parent_pid: int, modules: Sequence[str]) -> int:
    """Load for the first, then fork whenever asked. Returns in every command that comes of it, with its exit code."""
    die_with_parent(parent_pid)
    gc.disable()  # modules are no garbage, and looking takes a fifth of the time
    _import_modules(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's business here
    with socket.socket(fileno=0) as request_socket:
        while True:
            data, streams, _, _ = socket.recv_fds(request_socket, MAX_MESSAGE_BYTES, 2)
            if not data:
                return 0
            told = json.loads(data)
            _import_modules(told["loads"])
            if os.fork() == 0:
                break
            for each in streams:
                os.close(each)
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, each in enumerate((*streams, streams[-1])):
        os.dup2(each, number)
    for each in streams:
        os.close(each)
    command, patience = told["command"], str(told["patience"])
    _set_process_title([sys.executable, "-m", "ramify.launch.parent_watch", patience, *command])
    return run_watched(lambda: _run_command(command), stop_timeout=told["patience"])


def _import_modules(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # what is shared stays shared


def _run_command(command: Sequence[str]) -> int:
    from ramify.cli import main

    _set_process_title(command)
    sys.argv = ["ramify", *command[len(RAMIFY_COMMAND) :]]
    return main()


def _set_process_title(argv: Sequence[str]) -> None:
    """Be seen under this command line: it is written where the kernel reads it, over our own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted from the state
    name = "\0".join(argv).encode()[: end - start - 1]
    ctypes.memmove(start, name.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:-1]))
