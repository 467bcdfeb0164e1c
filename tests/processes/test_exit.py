"""How processes end: exit codes in words, and an exit without the teardown of modules."""

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from ramify.processes.exit import describe_exit, is_signal_exit


def test_describe_exit():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(128 + 9) == describe_exit(-9) == "was killed by SIGKILL"


def test_exit_by_signal():
    assert is_signal_exit(128 + 15) and is_signal_exit(-15)
    assert not is_signal_exit(0) and not is_signal_exit(127)


CODE = """
import atexit, sys, tempfile
from ramify.processes.exit import QUICK_EXIT

class Freed:
    def __del__(self):
        print("freed")

QUICK_EXIT.register()
QUICK_EXIT.register()
freed = Freed()
directory = tempfile.TemporaryDirectory()
atexit.register(print, "handler")
print(directory.name)
{end}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "code", "teardown"),
    [("QUICK_EXIT.exit(3)", 3, []), ("sys.exit(4)", 4, ["freed"]), ("raise ValueError", 1, ["freed"])],
)
def test_exit_handlers_run_and_modules_are_freed_only_after_an_error(end, code, teardown):
    result = subprocess.run([sys.executable, "-c", CODE.format(end=end)], capture_output=True, text=True, timeout=60)
    directory, *lines = result.stdout.splitlines()
    assert (result.returncode, lines) == (code, ["handler", *teardown])
    assert not Path(directory).exists()


SENDER = """
import sys
from ramify.processes.exit import QUICK_EXIT
import zmq

socket = zmq.Context.instance().socket(zmq.PUSH)
socket.connect(sys.argv[1])
socket.send(bytes(1 << 24))
socket.close(2000)
QUICK_EXIT.register()
QUICK_EXIT.exit(0)
"""


@pytest.mark.process
def test_queued_messages_are_sent():
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sender = subprocess.Popen([sys.executable, "-c", SENDER, f"tcp://127.0.0.1:{port}"])
        assert socket.poll(60_000) and len(socket.recv()) == 1 << 24
        assert sender.wait(60) == 0
