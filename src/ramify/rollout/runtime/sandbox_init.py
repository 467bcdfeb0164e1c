"""The first program in a sandbox: starts the programs that the host asks for and reports their exits.

It runs in the sandbox, with the standard library alone, and is given one end of a socket pair. It first hands out what
the host needs of the sandbox, as open files: the directory of its files, and a socket that listens in its network.

    host -> init   a file with {"op": "spawn", "id", "argv", "env", "cwd"}, and the program's standard files: input,
                   output and error, or the last two if its input is empty. With "preloaded", "argv" is a script or
                   `-m` with its arguments, and a fork of this program runs it.
                   a file with {"op": "kill", "id", "marker"}
    init -> host   {"id", "pid"} or {"id", "errno", "file"}, then {"id", "status"}
                   {"id", "killed"}: whether all processes of the program are gone

The sandbox ends with this program, and this program ends when the host closes the socket. Agents run as the same user.
They cannot end or stop this program: it is process 1 of the sandbox, to which the kernel delivers no signal from inside
that it does not handle. They cannot open its files or its memory either, since it is not dumpable. The host still
trusts nothing that it says beyond the first message.
"""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time

FILES_DIR = "/sandbox"
MARKER_VARIABLE = "RAMIFY_SANDBOX"
KILL_TIMEOUT = 5.0  # seconds for all processes of a program to be gone
KILL_INTERVAL = 0.01  # seconds
PR_SET_DUMPABLE = 4
MAX_UNREADABLE_ROUNDS = 10  # during `exec` a process has no environment; some never have one


def serve(control: socket.socket) -> "dict[str, object] | None":
    """Serve requests until the host closes the socket. Return the program in a fork that has to run one."""
    control.set_inheritable(False)
    _hand_out_files(control)
    _refuse_access()
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would let a program of the sandbox end this one
    signal.set_wakeup_fd(wakeup_write)
    ids: dict[int, int] = {}  # id of the request by process id
    while True:
        ready, _, _ = select.select([control, wakeup_read], [], [])
        if control in ready:
            _, fds, _, _ = socket.recv_fds(control, 16, 4)
            if not fds:
                return None
            for fd in fds:
                os.set_inheritable(fd, False)
            program = None
            try:
                program = _handle_request(control, fds, ids)
            finally:
                if program is None:
                    for fd in fds:
                        os.close(fd)
            if program is not None:
                return program
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
        _report_exits(control, ids)


def _refuse_access() -> None:
    """Refuse other processes access to the files and the memory of this one through /proc."""
    import ctypes  # after the host was told that the sandbox is ready: it takes some milliseconds

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot refuse access to this process")


def _ignore(_signal: int, _frame: object) -> None:
    """Do nothing: the signal is noticed through the wakeup file."""


def _hand_out_files(control: socket.socket) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    directory_fd = os.open(FILES_DIR, os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(control, [b"ready"], [directory_fd, listener.fileno()])
    os.close(directory_fd)
    listener.close()


def _handle_request(control: socket.socket, fds: list[int], ids: dict[int, int]) -> "dict[str, object] | None":
    with open(fds[0], "rb", closefd=False) as file:
        file.seek(0)
        request = json.load(file)
    if request["op"] == "kill":
        for pid in [pid for pid, id in ids.items() if id == request["id"]]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        _send(control, {"id": request["id"], "killed": _kill_marked(request["marker"])})
        return None
    files = fds[1:]
    first_target = 3 - len(files)
    empty_input = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)] if first_target else []
    try:
        os.chdir(request["cwd"])
        if request.get("preloaded"):
            if first_target:
                fds.append(os.open(os.devnull, os.O_RDONLY))  # the caller closes it
                files = [fds[-1], *files]
            pid, fork_fd = _fork()
            if pid == 0:
                return {**request, "files": files, "fork_fd": fork_fd}
        else:
            os.environ["PATH"] = request["env"].get("PATH", os.defpath)  # posix_spawnp searches the caller's PATH
            pid = os.posix_spawnp(
                request["argv"][0],
                request["argv"],
                request["env"],
                file_actions=[
                    *empty_input,
                    *((os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(files, first_target)),
                ],
                setsid=True,
                setsigdef=[signal.SIGCHLD, signal.SIGPIPE],
            )
    except OSError as error:
        file_name = error.filename if isinstance(error.filename, str) else request["argv"][0]
        _send(control, {"id": request["id"], "errno": error.errno, "file": file_name})
    except ValueError:  # such as a variable whose name contains "="
        _send(control, {"id": request["id"], "errno": errno.EINVAL, "file": request["argv"][0]})
    else:
        ids[pid] = request["id"]
        _send(control, {"id": request["id"], "pid": pid})
    finally:
        os.chdir("/")
    return None


def _fork() -> tuple[int, int]:
    """Fork, and wait until the fork closes the returned file: it can then be found and killed."""
    read_fd, write_fd = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(write_fd)
        os.close(read_fd)
        raise
    if pid:
        os.close(write_fd)
        os.read(read_fd, 1)
        os.close(read_fd)
    return pid, write_fd


def _report_exits(control: socket.socket, ids: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            id = ids.pop(result[0], None)
            if id is not None:
                _send(control, {"id": id, "status": os.waitstatus_to_exitcode(result[1])})


def _kill_marked(marker: str) -> bool:
    """Kill all processes with this marker in their environment; they may have left their parent and their session.

    Return whether all of them are gone.
    """
    pattern = f"{MARKER_VARIABLE}={marker}".encode()
    deadline, unreadable_rounds = time.monotonic() + KILL_TIMEOUT, 0
    while True:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        environments = {pid: _read_environment(pid) for pid in pids if pid != os.getpid()}
        marked = [pid for pid, variables in environments.items() if variables is not None and pattern in variables]
        unreadable_rounds = 0 if marked else unreadable_rounds + 1
        if not marked and (unreadable_rounds >= MAX_UNREADABLE_ROUNDS or None not in environments.values()):
            return True
        if marked and time.monotonic() > deadline:
            return False
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_INTERVAL)


def _read_environment(pid: int) -> list[bytes] | None:
    """Return the variables of a process, [] if it has exited; None if it runs without an environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read()
        if variables:
            return variables.split(b"\0")
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return []
    return [] if state in b"ZX" else None


def _send(control: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
