"""The page in a thread beside a run, as `ramify rl --view` serves it."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from ramify.cli.rl import serve_page_of_run
from ramify.errors import DeadlineExceeded, PortTaken
from ramify.view import serving
from ramify.view.serving import serve_in_thread

DEADLINE = 20.0  # seconds for an answer, or for the thread


def list_threads():
    return [thread for thread in threading.enumerate() if thread.name == "view"]


def test_the_page_is_served_while_the_block_runs(tmp_path):
    with serve_in_thread(tmp_path) as address:
        assert b"Ramify" in urlopen(address, timeout=DEADLINE).read()
    assert list_threads() == []


def test_a_block_is_not_failed_by_a_server_that_has_ended(tmp_path, monkeypatch):
    async def end_at_once(folder, stop, on_address):
        on_address("http://127.0.0.1:1")

    monkeypatch.setattr(serving, "serve_page", end_at_once)
    with serve_in_thread(tmp_path):
        [thread.join(DEADLINE) for thread in list_threads()]


def test_a_server_that_starts_too_late_is_stopped(tmp_path, monkeypatch):
    may_start = threading.Event()

    async def start_late(folder, stop, on_address):
        await asyncio.to_thread(may_start.wait, DEADLINE)
        on_address("http://127.0.0.1:1")
        await stop.wait()

    monkeypatch.setattr(serving, "serve_page", start_late)
    monkeypatch.setattr(serving, "START_TIMEOUT", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the page"), serve_in_thread(tmp_path):
        pass
    [thread] = list_threads()
    may_start.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_a_run_goes_on_without_a_page_that_cannot_be_served(monkeypatch, capsys):
    async def fail(folder, stop, on_address):
        raise PortTaken("no port is free")

    monkeypatch.setattr(serving, "serve_page", fail)
    with serve_page_of_run(SimpleNamespace(path=Path("outputs/run"))):
        pass
    assert "the run is not shown on a page: PortTaken: no port is free" in capsys.readouterr().err


def test_a_run_prints_the_address_of_its_page_and_opens_no_browser(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser was opened"))
    with serve_page_of_run(SimpleNamespace(path=tmp_path / "a run")):
        address = capsys.readouterr().out.split()[-1]
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/#/run/a%20run")
