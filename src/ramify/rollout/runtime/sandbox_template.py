"""The template of forked sandboxes: imports packages once, and forks for every sandbox.

It runs twice. First with the Python of the worker, outside: it enters an outer sandbox, which has the mounts of every
sandbox and no network, and becomes the Python of the agent, as the first process of that sandbox. There it imports the
packages, and then only forks. It is never given a task, a token or the output of a model.

    host -> template   a file with {"mounts"}, and the socket of a new sandbox
    template -> host   {"ready"} or {"refused"} or {"failed"} at the start, then {"pid", "status"} for each that exits

    fork -> host       "forked": the host moves it into the control group of the sandbox, and answers
    fork               enters namespaces of its own in the outer sandbox, and drops all privileges
    fork -> host       "ready", as `sandbox_init` says it, or {"refused"}

From then on a fork is `sandbox_init`, which forks once more for the agent's program. All open files but the socket of
its own sandbox are closed: nothing leads from it to the template.
"""

from __future__ import annotations

import atexit
import base64
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from typing import Any, NoReturn

TEMPLATE_FILE, INIT_FILE, NAMESPACES_FILE = "/.template.py", "/.init.py", "/.namespaces.py"
HOSTNAME = "sandbox"
PR_SET_PDEATHSIG = 1
ARGUMENTS_FIELD = 45  # of /proc/self/stat behind the name: where arguments and environment begin and end in memory
NOT_FOUND_CODE = 2  # of Python, for a script that cannot be opened


def start_outside(control_fd: int, namespaces_file: str) -> None:
    """Enter the outer sandbox and become the Python of the agent."""
    control = socket.socket(fileno=control_fd)
    _, (setup_fd,), _, _ = socket.recv_fds(control, 16, 1)
    setup = _read_file(setup_fd)
    namespaces = _load_module("sandbox_namespaces", namespaces_file)
    _die_with_parent()
    try:
        pid = namespaces.unshare_and_fork(HOSTNAME, "/proc")
        if pid:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)  # as a shell does for a signal
        _die_with_parent()
        proc_fd = namespaces.open_process_directory()
        namespaces.build_root(setup["mounts"])
        namespaces.become_user(proc_fd)
        namespaces.drop_privileges()
        _open_null_files()
        for fd in (control_fd, setup_fd, proc_fd):
            os.set_inheritable(fd, True)
        argv = [*setup["python"], TEMPLATE_FILE, str(control_fd), str(setup_fd), str(proc_fd)]
        os.execvpe(argv[0], argv, setup["env"])
    except OSError as error:
        _send(control, {"refused": str(error)})
        os._exit(1)


def start_inside(control_fd: int, setup_fd: int, proc_fd: int) -> None:
    """Import the packages and fork for every sandbox; in a fork, run the sandbox."""
    for fd in (control_fd, setup_fd, proc_fd):
        os.set_inheritable(fd, False)
    _die_with_parent()
    control, setup = socket.socket(fileno=control_fd), _read_file(setup_fd)
    os.close(setup_fd)
    namespaces, init = _load_module("sandbox_namespaces", NAMESPACES_FILE), _load_module("sandbox_init", INIT_FILE)
    seccomp_filter = base64.b64decode(setup["filter"])
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # the directory of this file
    for name in setup["modules"]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - a package may raise anything, also SystemExit
            _send(control, {"failed": f"{name} cannot be imported: {type(error).__name__}: {error}"})
            os._exit(1)
    memory = _read_memory_range()
    preloaded = set(sys.modules)
    if reason := _find_shared_state({0, 1, 2, control_fd, proc_fd}):
        _send(control, {"refused": reason})
        os._exit(1)
    gc.collect()
    gc.freeze()
    _send(control, {"ready": True})
    request = _fork_on_request(control)
    if request is None:
        os._exit(0)
    program = _run_sandbox(*request, proc_fd, seccomp_filter, namespaces, init)
    if program is None:
        os._exit(0)
    os.environ.clear()  # before the memory is overwritten in which the C library looks for the names
    os.environ.update(program["env"])
    sys.orig_argv[:] = [*setup["python"], *program["argv"]]
    _overwrite_proc_cmdline(memory, sys.orig_argv, program["env"][init.MARKER_VARIABLE])
    os.setsid()
    _take_standard_files(program)
    namespaces.allow_access()  # when the socket of the first program is closed
    os.close(program["fork_fd"])
    _run_program(program, preloaded)


def _fork_on_request(control: socket.socket) -> tuple[list[list[str]], socket.socket] | None:
    """Fork for each request of the host. Return the request in a fork, None when the host has closed the socket."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(wakeup_write)
    forks: set[int] = set()
    while True:
        ready, _, _ = select.select([control, wakeup_read], [], [])
        if control in ready:
            _, fds, _, _ = socket.recv_fds(control, 16, 2)
            if len(fds) != 2:
                return None
            mounts = _read_file(fds[0])["mounts"]
            os.close(fds[0])
            os.set_inheritable(fds[1], False)
            sandbox_control = socket.socket(fileno=fds[1])
            try:
                pid = os.fork()
            except OSError as error:  # this process must live on: all running sandboxes end with it
                _send(sandbox_control, {"refused": str(error), "errno": error.errno})
            else:
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wakeup_read)
                    os.close(wakeup_write)
                    control.close()
                    return mounts, sandbox_control
                forks.add(pid)
            sandbox_control.close()
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                if result[0] in forks:
                    forks.discard(result[0])  # it has left the first process of its sandbox to this process
                else:
                    _send(control, {"pid": result[0], "status": os.waitstatus_to_exitcode(result[1])})


def _run_sandbox(
    mounts: list[list[str]],
    control: socket.socket,
    proc_fd: int,
    seccomp_filter: bytes,
    namespaces: types.ModuleType,
    init: types.ModuleType,
) -> dict[str, Any] | None:
    """Make the sandbox and serve it until its end. Return the program in a fork that runs one."""
    try:
        control.send(b"forked")
        if not control.recv(16):  # the host has moved this process into the control group
            os._exit(0)
        if namespaces.unshare_and_fork(HOSTNAME, proc_fd):
            os._exit(0)
        namespaces.build_root(mounts)
        namespaces.become_user(proc_fd)
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _open_null_files()
        namespaces.drop_privileges(seccomp_filter)
    except OSError as error:
        _send(control, {"refused": str(error), "errno": error.errno})
        os._exit(1)
    program: dict[str, Any] | None = init.serve(control)
    return program


def _take_standard_files(program: dict[str, Any]) -> None:
    """Close all files but the program's standard files and the one for which the first program waits."""
    for target, fd in enumerate(program["files"]):
        os.dup2(fd, target)
    os.closerange(3, program["fork_fd"])
    os.closerange(program["fork_fd"] + 1, os.sysconf("SC_OPEN_MAX"))


def _run_program(program: dict[str, Any], preloaded: set[str]) -> NoReturn:
    """Do what Python does for a script or `-m` and its arguments, and exit as Python does."""
    os.chdir(program["cwd"])
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _open_stream(fd, getattr(sys, "__" + name + "__"))
        setattr(sys, name, stream)
        setattr(sys, "__" + name + "__", stream)
    _seed_again()
    code = _run_main(program["argv"])
    _run_exit_handlers(preloaded)
    os._exit(code)


def _run_main(argv: list[str]) -> int:
    """Run a script or a module as `__main__` and return its exit code."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    script = os.path.abspath(argv[0])
    sys.modules["__main__"] = main
    has_safe_path = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[1:]
            if not has_safe_path:
                sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(argv[1])  # pyrefly: ignore[missing-attribute]
            return 0
        sys.argv[:] = argv
        if not has_safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        try:
            with io.open_code(script) as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.executable}: can't open file {script!r}: {error}", file=sys.stderr)
            return NOT_FOUND_CODE
        loader = importlib.machinery.SourceFileLoader("__main__", script)
        main.__dict__.update(__file__=script, __cached__=None, __loader__=loader)
        exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0


def _run_exit_handlers(preloaded: set[str]) -> None:
    """Wait for threads, run exit handlers, and let go of what the program made, which writes its open files.

    The packages of the template stay: to tear them down takes longer than most programs.
    """
    for handler in (threading._shutdown, atexit._run_exitfuncs):  # pyrefly: ignore[missing-attribute]
        with contextlib.suppress(BaseException):
            handler()
    own_modules = [module for name, module in list(sys.modules.items()) if name not in preloaded]
    for module in [sys.modules["__main__"], *reversed(own_modules)]:
        with contextlib.suppress(BaseException):
            module.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _seed_again() -> None:
    """Give this fork random numbers of its own. Process ids of sandboxes are equal, so a library cannot notice it."""
    modules: dict[str, Any] = dict(sys.modules)
    if "random" in modules:
        modules["random"].seed()
    if "ssl" in modules:
        modules["ssl"].RAND_add(os.urandom(32), 32.0)
    if "tempfile" in modules:
        modules["tempfile"]._name_sequence = None
    if "uuid" in modules:
        modules["uuid"]._last_timestamp = None
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    if "torch" in modules:
        modules["torch"].seed()


def _find_shared_state(own_fds: set[int]) -> str | None:
    """Return why this process must not be forked for programs that know nothing of each other; None if it may be."""
    pid = os.fork()  # libraries such as OpenBLAS end their threads before a fork
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        return "a preloaded package has started threads, which a fork does not have"
    open_files = sorted(set(map(int, os.listdir("/proc/self/fd"))) - own_fds)
    if len(open_files) > 1:  # one is the listing itself
        return "a preloaded package has opened files or sockets, which all forks would share"
    with open("/proc/self/maps") as file:
        for line in file:
            if line.split()[1][1::2] == "ws":
                return "a preloaded package has made memory that all forks would share: " + line.strip()
    return None


def _open_stream(fd: int, earlier: Any) -> io.TextIOWrapper:
    """Return a standard stream as Python opens it; `earlier` is the template's."""
    raw = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
    is_unbuffered = fd > 0 and isinstance(earlier.buffer, io.FileIO)
    buffer: Any = raw if is_unbuffered else io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        buffer,
        earlier.encoding,
        earlier.errors,
        newline=None if fd == 0 else "\n",
        line_buffering=earlier.line_buffering,
        write_through=earlier.write_through,
    )
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    return stream


def _open_null_files() -> None:
    """Let the standard files of this process be the null device of its sandbox."""
    fd = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(fd, target)
    if fd > 2:
        os.close(fd)


def _read_memory_range() -> list[int]:
    """Return where the arguments and the environment of this process begin and end in memory."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return [int(field) for field in fields[ARGUMENTS_FIELD : ARGUMENTS_FIELD + 4]]


def _overwrite_proc_cmdline(memory: list[int], argv: list[str], marker: str) -> None:
    """Let /proc show the program's arguments and its marker, by which `sandbox_init` finds its processes."""
    texts = ["\0".join(argv), "RAMIFY_SANDBOX=" + marker]
    for start, end, text in zip(memory[::2], memory[1::2], texts):
        size = end - start
        ctypes.memmove(start, os.fsencode(text)[: size - 1].ljust(size, b"\0"), size)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _load_module(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read_file(fd: int) -> dict[str, Any]:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return json.load(file)


def _ignore(_signal: int, _frame: object) -> None:
    """Do nothing: the signal is noticed through the wakeup file."""


def _send(control: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    if __file__ == TEMPLATE_FILE:
        start_inside(*map(int, sys.argv[1:]))
    else:
        start_outside(int(sys.argv[1]), sys.argv[2])
