"""The watchdog of a process: calls on storage that hang end the process, with a named failure."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from ramify.core.errors import RamifyError, StorageFailed
from ramify.core.watchdog import WATCHDOG, Watchdog, WatchdogSettings
from ramify.model.weights_manifest import MANIFEST_FILE, Manifest
from ramify.orchestrate.address_book import ADDRESS_BOOK_FILE, read_addresses
from ramify.processes.log import ProcessLog
from ramify.run.fencing.head_log import DirectoryStore
from ramify.run.state import OrchestratorState, SupervisorState
from tests.support.processes import wait_until

SETTINGS = WatchdogSettings(poll_interval=1.0, storage_limit=10.0, min_transfer_rate=1e6, warning_delay=1e9)
HANGS = """
import os, sys
from pathlib import Path
from ramify.core.files import read_bytes
from ramify.core.watchdog import WATCHDOG, WatchdogSettings

WATCHDOG.settings = WatchdogSettings(poll_interval=0.05, storage_limit=0.2)
stderr = sys.argv[2]
if stderr == "hangs":
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, bytes(65536))
    except BlockingIOError:
        os.set_blocking(2, True)
read_bytes(Path(sys.argv[1]))
"""


class RecordedFailures(list[RamifyError]):
    """The failures of a watchdog that does not end its process, which polls only when a test does."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(SETTINGS, fail=self.append)
        self.watchdog._thread = threading.current_thread()

    def poll(self, count: int) -> None:
        for _ in range(count):
            self.watchdog.poll()


@pytest.fixture
def failures() -> RecordedFailures:
    return RecordedFailures()


def test_call_that_is_in_flight_for_too_many_polls_is_named(failures):
    with failures.watchdog.watch_storage("/mnt/run"):
        failures.poll(10)
        assert failures == []
        failures.poll(1)
    (error,) = failures
    assert isinstance(error, StorageFailed)
    problem = "/mnt/run: the storage has not answered for 11 s"
    assert error.message == f"{problem}; check the disk and the mounts, then repeat the command"


def test_call_of_many_bytes_may_take_longer(failures):
    with failures.watchdog.watch_storage("/mnt/run", num_bytes=5_000_000):
        failures.poll(15)
        assert failures == []
        failures.poll(1)
    assert len(failures) == 1


def test_calls_that_return_are_not_counted_together(failures):
    for _ in range(5):
        with failures.watchdog.watch_storage("/mnt/run"):
            failures.poll(9)
    failures.poll(100)
    assert failures == []


def test_failed_call_is_no_longer_in_flight(failures):
    with pytest.raises(OSError, match="gone"), failures.watchdog.watch_storage("/mnt/run"):
        raise OSError("gone")
    failures.poll(100)
    assert failures == []


def test_check_is_called_at_every_poll_until_it_is_removed(failures):
    calls = []

    def check():
        calls.append(len(calls))

    failures.watchdog.add_check(check)
    failures.poll(2)
    failures.watchdog.remove_check(check)
    failures.poll(2)
    assert calls == [0, 1]


def test_forked_process_forgets_the_calls_of_its_parent(failures):
    with failures.watchdog.watch_storage("/mnt/run"):
        failures.watchdog.reset()
        failures.poll(100)
    assert failures == []


def test_thread_polls_and_names_the_call(tmp_path):
    failures = []
    settings = WatchdogSettings(poll_interval=0.01, storage_limit=0.05)
    watchdog = Watchdog(settings, fail=failures.append)
    with watchdog.watch_storage(tmp_path):
        wait_until(lambda: failures)
    assert failures[0].message.startswith(f"{tmp_path}: the storage has not answered")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (OrchestratorState.FILE, OrchestratorState.read),
        (SupervisorState.FILE, SupervisorState.read),
        (ADDRESS_BOOK_FILE, read_addresses),
        (MANIFEST_FILE, Manifest.read),
        ("term", lambda path: DirectoryStore(path).read("term")),
        ("trainer.log", lambda path: ProcessLog(path / "trainer.log").tail()),
    ],
)
def test_file_that_is_being_read_is_watched(tmp_path, name, read):
    os.mkfifo(tmp_path / name)

    def is_watched():
        return tmp_path / name in [call.path for call in WATCHDOG.list_calls()]

    def read_damaged():
        with contextlib.suppress(RamifyError):
            read(tmp_path)

    thread = threading.Thread(target=read_damaged, daemon=True)
    thread.start()
    try:
        wait_until(is_watched)
    finally:
        with contextlib.suppress(BrokenPipeError), (tmp_path / name).open("wb") as file:
            file.write(b"[")
        thread.join(60)
    assert not is_watched()


@pytest.mark.process
@pytest.mark.parametrize("stderr", ["works", "hangs"])
def test_process_ends_by_name_also_if_its_log_hangs(tmp_path, stderr):
    os.mkfifo(tmp_path / "orchestrator.json")
    command = [sys.executable, "-c", HANGS, str(tmp_path / "orchestrator.json"), stderr]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    if stderr == "works":
        assert f"StorageFailed: {tmp_path}/orchestrator.json: the storage has not answered" in result.stderr


def test_a_check_that_raises_is_reported_once_and_the_others_are_still_called(failures, capfd):
    calls = []
    failures.watchdog.add_check(fail := lambda: 1 / 0)
    failures.watchdog.add_check(lambda: calls.append("called"))
    failures.poll(2)
    failures.watchdog.remove_check(fail)
    assert calls == ["called"] * 2
    assert capfd.readouterr().err.count("division by zero") == 1


@pytest.mark.process
def test_cleanups_that_raise_do_not_keep_the_process_alive():
    code = """
from ramify.core.watchdog import WATCHDOG
def fail(): raise OSError(24, "too many open files")
WATCHDOG.cleanups += [fail, lambda: print("cleaned up", flush=True)]
WATCHDOG.end_process(lambda: None, 7)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (7, "cleaned up\n"), result.stderr
