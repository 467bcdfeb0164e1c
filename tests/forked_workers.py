"""Workers of pytest-xdist that are forked from one process, which has imported all test modules.

    pytest -n 3 --starts--> fork server: collects the tests once
         |                       |
         |                     forks
         |                       v
         +--starts--> client = worker: has the standard streams of its client

Each worker collects all tests, and spends most of that time importing the test modules, torch and transformers. A
forked worker finds them imported. xdist starts a client, this file as a script, in the place of an interpreter. It
passes its standard streams to the fork server, and ends when its worker does.

What a test module makes when it is imported, such as a temporary directory or a process id, is the same in all workers.
A module must not start threads when it is imported, also not those of torch: a forked process would wait for them.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # a client does not need it

ROOT = Path(__file__).parents[1]
SERVER = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.forked_workers import serve; serve()"
BOOTSTRAP = "import sys; exec(eval(sys.stdin.readline()))"  # what execnet runs in the interpreter of a worker
NUM_STREAMS = 3


def start_fork_server(config: "pytest.Config") -> str:
    """Start the fork server of a session, which ends with it, and return the command of a client."""
    folder = Path(tempfile.mkdtemp(prefix="pytest-workers-"))  # only this user can connect
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-c", SERVER, str(os.getpid()), *config.invocation_params.args]
        server = subprocess.Popen(command, stdin=listener.fileno(), stdout=subprocess.DEVNULL)

    def stop() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder)

    config.add_cleanup(stop)
    return shlex.join([sys.executable, "-P", __file__, address])


class FailedModules:
    """A plugin that forgets modules that could not be collected: each worker imports them again and reports why."""

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        """Remove a module that is half imported."""
        if not report.passed:
            sys.modules.pop(report.nodeid.removesuffix(".py").replace("/", "."), None)


def serve() -> None:
    """Collect the tests, then fork a worker for each client; the server and its workers end with the session."""
    import pytest

    from ramify.processes.watcher import die_with_parent

    _, parent_pid, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    listener = socket.socket(fileno=os.dup(0))
    pytest.main([*arguments, "-n0", "--collect-only", "-qq"], plugins=[FailedModules()])
    check_threads()
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends the server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    server_pid = os.getpid()
    while True:
        client, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(client, 1, NUM_STREAMS)
        if os.fork() == 0:
            break
        client.close()
        for stream in streams:
            os.close(stream)
    die_with_parent(server_pid)
    listener.close()
    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    exec(BOOTSTRAP, {"__name__": "__main__"})  # `client` is closed when this process ends


def check_threads() -> None:
    """Exit if importing the test modules has started threads; those of memory allocators have names of their own."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    if names.count(Path("/proc/self/comm").read_text()) > 1:
        sys.exit("importing the test modules started threads, such as those of torch; expected none before a fork")


def wait_for_worker(address: str) -> None:
    """Let the fork server start a worker with the standard streams of this process, and wait until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends the worker
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [b"."], range(NUM_STREAMS))
        with contextlib.suppress(ConnectionError):
            server.recv(1)


if __name__ == "__main__":
    wait_for_worker(sys.argv[1])
