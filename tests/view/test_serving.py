"""The page in a thread beside a run, as `ramify rl --view` serves it."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from ramify.cli.app import main
from ramify.cli.rl import serve_page_of_run
from ramify.core.errors import DeadlineExceeded, PortTaken, ProcessDied
from ramify.launch.execution import RunResult
from ramify.launch.supervisor import RunOutcome
from ramify.view import server
from ramify.view.server import serve_in_thread
from tests.support.sample_runs import write_rl_run

DEADLINE = 20.0  # seconds for an answer, or for the thread


def list_threads():
    return [thread for thread in threading.enumerate() if thread.name == "view"]


def test_a_block_is_not_failed_by_a_server_that_has_ended(tmp_path, monkeypatch):
    async def end_at_once(folder, stop, on_address):
        on_address("http://127.0.0.1:1")

    monkeypatch.setattr(server, "serve_page", end_at_once)
    with serve_in_thread(tmp_path):
        [thread.join(DEADLINE) for thread in list_threads()]


def test_a_server_that_starts_too_late_is_stopped(tmp_path, monkeypatch):
    may_start = threading.Event()

    async def start_late(folder, stop, on_address):
        await asyncio.to_thread(may_start.wait, DEADLINE)
        on_address("http://127.0.0.1:1")
        await stop.wait()

    monkeypatch.setattr(server, "serve_page", start_late)
    monkeypatch.setattr(server, "START_TIMEOUT", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the page"), serve_in_thread(tmp_path):
        pass
    [thread] = list_threads()
    may_start.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_a_run_goes_on_without_a_page_that_cannot_be_served(monkeypatch, capsys):
    async def fail(folder, stop, on_address):
        raise PortTaken("no port is free")

    monkeypatch.setattr(server, "serve_page", fail)
    with serve_page_of_run(SimpleNamespace(path=Path("outputs/run"))):
        pass
    assert "the run is not shown on a page: PortTaken: no port is free" in capsys.readouterr().err


def test_a_run_prints_the_address_of_its_page_and_opens_no_browser(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was opened"))
    with serve_page_of_run(SimpleNamespace(path=tmp_path / "a run")):
        address = capsys.readouterr().out.split()[-1]
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/#/run/a%20run")


class TrainingStub:
    """Stands in for the run itself: it writes a run directory, and asks the page about it while it is served."""

    def __init__(self, capsys, failure):
        self._capsys, self._failure = capsys, failure
        self.address, self.states = "", {}

    def __call__(self, config, **_):
        write_rl_run(config.path)
        self.address = self._capsys.readouterr().out.split()[-1].partition("/#")[0]
        with urlopen(f"{self.address}/api/runs", timeout=DEADLINE) as response:
            self.states = {run["name"]: run["state"] for run in json.load(response)}
        if self._failure is not None:
            raise self._failure
        return RunResult(config.path, RunOutcome.FINISHED, steps=4)


@pytest.mark.parametrize(("failure", "exit_code"), [(None, 0), (ProcessDied("exit code -9"), 1)])
def test_rl_view_serves_the_page_until_the_run_ends(tmp_path, monkeypatch, capsys, failure, exit_code):
    training = TrainingStub(capsys, failure)
    monkeypatch.setattr("ramify.cli.rl.rl", training)
    arguments = ["reverse-text", "-m", "tiny", "--name", "a run", "-o", str(tmp_path), "--view"]
    assert main(["rl", *arguments]) == exit_code
    assert training.states == {"a run": "finished"}
    with pytest.raises(URLError, match="refused"):
        urlopen(f"{training.address}/api/runs", timeout=DEADLINE)
