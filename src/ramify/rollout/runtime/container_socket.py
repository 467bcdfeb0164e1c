"""A listening socket in the network of a container, held by this process.

The module is also the program that opens the socket there. It runs without site packages, so it imports nothing but the
standard library.
"""

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

HELPER_TIMEOUT = 20.0  # seconds


async def open_listener(pid: int, expected_argument: str) -> socket.socket:
    """Return a socket that listens in the network of a container and is held by this process.

    A helper process enters that network, opens the socket there and hands it out: what a program of the container sends
    to it reaches this process, and nothing else is reachable.

    - `pid`: the container's first process.
    - `expected_argument`: one of the arguments of that process; a process without it is refused.

    Raises OSError if the process is not visible here, or if its network may not be entered.
    """
    arguments = await asyncio.to_thread(Path(f"/proc/{pid}/cmdline").read_bytes)
    if expected_argument.encode() not in arguments.split(b"\0"):
        raise ProcessLookupError(f"process {pid} of this machine is not the container's first process")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        helper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            __file__,
            str(pid),
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(HELPER_TIMEOUT):
                _, stderr = await helper.communicate()
        finally:
            if helper.returncode is None:
                helper.kill()
                await helper.wait()
        if helper.returncode:
            raise PermissionError("".join(stderr.decode("utf-8", "replace").strip().splitlines()[-1:]))
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    os.set_inheritable(fds[0], False)
    return listener


def main(pid: int, control_fd: int) -> None:
    """Enter the network of a process, and send a socket that listens there."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("user", "net"):
        path = Path(f"/proc/{pid}/ns/{name}")
        if path.samefile(f"/proc/self/ns/{name}"):
            if name == "net":
                raise SystemExit("the container has the network of this machine")
            continue
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(fd, 0):
            reason = os.strerror(ctypes.get_errno())
            raise SystemExit(f"the {name} namespace of the container cannot be entered: {reason}")
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    with socket.socket(fileno=control_fd) as control:
        socket.send_fds(control, [b"listener"], [listener.fileno()])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
