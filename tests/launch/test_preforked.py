"""Processes that are forked from one that has loaded their modules: the same as those that are started."""

import asyncio
import functools
import os
import signal
import sys
from contextlib import asynccontextmanager

import psutil
import pytest

from ramify.launch.preforked import RAMIFY_COMMAND, start_prefork_server
from ramify.launch.process import ProcessSpec, SupervisedProcess
from tests.launch.scripts import until

SEEN = {"RAMIFY_TEST": "seen"}


def bounded(test):
    """An async test with an end."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 30))

    return run


def entries(folder, *commands: tuple[str, ...], loads=("colorsys",), env=SEEN) -> list[ProcessSpec]:
    """Commands of ramify that have something to load; two of them, so that it pays."""
    both = [*commands, ("--version",)]
    return [
        ProcessSpec(f"p{at}", (*RAMIFY_COMMAND, *words), folder / f"p{at}.log", env=env, loads=loads)
        for at, words in enumerate(both)
    ]


def serving(folder) -> tuple[str, ...]:
    """A command that lives on."""
    return ("env-server", "--train.0.taskset.id", "reverse-text", "-b", "http://127.0.0.1:9", "-o", str(folder))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@asynccontextmanager
async def born(entry: ProcessSpec, found):
    """One life of it."""
    life = SupervisedProcess(entry, stop_timeout=2.0, prefork_client=found)
    await life.start()
    try:
        yield life
    finally:
        await life.stop()


@bounded
async def test_forked_command_has_its_own_title_session_log_and_exit_code(tmp_path):
    told, wrong, _ = entries(tmp_path, ("doctor", "--help"), ("serv",))
    with start_prefork_server([told, wrong]) as found:
        (parent,) = [one for one in psutil.Process().children() if "ramify.launch.preforked" in one.cmdline()]
        async with born(told, found) as life:
            assert await life.wait_for_exit() == 0
        assert "usage: ramify doctor" in told.log.read_text()
        async with born(wrong, found) as life:
            assert await life.wait_for_exit() == 2
        assert "did you mean 'ramify serve'" in life.tail()
        serve = ProcessSpec(
            "p0", (*RAMIFY_COMMAND, *serving(tmp_path)), tmp_path / "serve.log", env=SEEN, loads=told.loads
        )
        async with born(serve, found) as life:
            command = psutil.Process(life.pid)
            until(lambda: command.cmdline()[: len(serve.command)] == list(serve.command))
            leash = command.parent()
            assert leash.cmdline()[:4] == [sys.executable, "-m", "ramify.launch.parent_watch", "2.0"]
            assert leash.parent() == parent
            assert os.getsid(command.pid) == leash.pid
            assert command.environ()["RAMIFY_TEST"] == "seen"
    assert gone(parent) and gone(leash) and gone(command)


@pytest.mark.parametrize("victim", ["command", "leash"])
@bounded
async def test_kill_is_reported_as_exit_by_signal(tmp_path, victim):
    entry, *rest = entries(tmp_path, serving(tmp_path))
    with start_prefork_server([entry, *rest]) as found:
        async with born(entry, found) as life:
            command = psutil.Process(life.pid)
            (command if victim == "command" else command.parent()).send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(life.wait_for_exit(), 5) in (-9, 128 + 9)
            until(lambda: gone(command))


@bounded
async def test_process_is_started_directly_without_a_fork_server(tmp_path):
    entry, *rest = entries(tmp_path, ("--version",), loads=("a_module_that_is_not_there",))
    with start_prefork_server([entry, *rest]) as found:
        async with born(entry, found) as life:
            assert await life.wait_for_exit() == 0
        async with born(entry, found) as life:  # it is known to be gone by now
            assert await life.wait_for_exit() == 0
    assert entry.log.read_text().count("ramify ") == 2


@bounded
async def test_forked_processes_survive_the_fork_server(tmp_path):
    entry, *rest = entries(tmp_path, serving(tmp_path))
    with start_prefork_server([entry, *rest]) as found:
        async with born(entry, found) as life:
            command = psutil.Process(life.pid)
            nest = command.parent().parent()
            nest.kill()
            until(lambda: gone(nest))
            assert command.is_running()
        assert gone(command)


def test_fork_server_needs_two_processes_with_the_same_environment(tmp_path):
    one, other = entries(tmp_path, ("--version",))
    with start_prefork_server([one]) as found:
        assert found is None
    with start_prefork_server(
        [one, ProcessSpec(other.name, other.command, other.log, env={}, loads=other.loads)]
    ) as found:
        assert found is None
