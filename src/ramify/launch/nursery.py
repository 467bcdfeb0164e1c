"""`python -m ramify.launch.nursery PARENT MODULES`: loads what several processes need, once, and forks them.

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

from ramify.launch.leash import die_with, hold

if TYPE_CHECKING:
    from ramify.launch.process import Entry

RAMIFY = (sys.executable, "-m", "ramify")  # how the commands begin that can be forked
MESSAGE = 1 << 16  # bytes of the longest command
ROOM = " " * 1024  # for the names of those that are born


class Nursery:
    """The supervisor's end of the door."""

    def __init__(self, door: socket.socket, names: Sequence[str]) -> None:
        self._door, self._names = door, names

    def ask(self, entry: "Entry", patience: float, line: socket.socket, log: int) -> bool:
        """Ask for a birth, on a leash that ends with `line`; False where there will be none."""
        if entry.name not in self._names:
            return False
        told = json.dumps({"patience": patience, "command": entry.command, "loads": entry.loads}).encode()
        try:
            socket.send_fds(self._door, [told], [line.fileno(), log])
        except OSError:  # it is gone
            return False
        return True


@contextlib.contextmanager
def nursery(entries: Sequence["Entry"]) -> Iterator[Nursery | None]:
    """A nursery for those that load the same and see the same, where there are two at least."""
    needy = [entry for entry in entries if entry.loads and entry.command[:3] == RAMIFY]
    if len(needy) < 2 or any(entry.env != needy[0].env for entry in needy):
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        child = subprocess.Popen(
            [sys.executable, "-m", "ramify.launch.nursery", str(os.getpid()), *needy[0].loads, ROOM],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # who cannot load something says so when it is started by itself
            env={**os.environ, **needy[0].env},
            start_new_session=True,
        )
        theirs.close()
        try:
            yield Nursery(ours, [entry.name for entry in needy])
        finally:
            child.kill()
            child.wait()


def main(parent: int, modules: Sequence[str]) -> int:
    """Load for the first, then fork whenever asked. Returns in every command that comes of it, with its exit code."""
    die_with(parent)
    gc.disable()  # modules are no garbage, and looking takes a fifth of the time
    _load(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's business here
    with socket.socket(fileno=0) as door:
        while True:
            data, streams, _, _ = socket.recv_fds(door, MESSAGE, 2)
            if not data:
                return 0
            told = json.loads(data)
            _load(told["loads"])
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
    _rename([sys.executable, "-m", "ramify.launch.leash", patience, *command])
    return hold(lambda: _run(command), grace=told["patience"])


def _load(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()  # what is shared stays shared


def _run(command: Sequence[str]) -> int:
    from ramify.cli import main

    _rename(command)
    sys.argv = ["ramify", *command[len(RAMIFY) :]]
    return main()


def _rename(words: Sequence[str]) -> None:
    """Be seen under this command line: it is written where the kernel reads it, over our own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), counted from the state
    name = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, name.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:-1]))
