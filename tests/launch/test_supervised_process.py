"""Processes that are forked from a fork server are like those that are started directly."""

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec

import psutil
import pytest

from ramify.launch.launcher import ProcessSpec, ProcessStart
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervised_process import SupervisedProcess, is_responding
from ramify.processes.child import RAMIFY_COMMAND, STOP_TIMEOUT, ChildProcess
from ramify.processes.prefork import start_prefork_server
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE
from tests.support.launchers import build_leases
from tests.support.processes import is_running, wait_until, wait_until_ended

pytestmark = pytest.mark.process

ENVIRONMENT = {"RAYON_NUM_THREADS": "3"}


def build_specs(directory, *commands: tuple[str, ...], modules=("colorsys",), env=ENVIRONMENT) -> list[ProcessSpec]:
    """Return processes that preload modules: the given commands and one more, because a fork server needs two."""
    starts = [ProcessStart((*RAMIFY_COMMAND, *arguments)) for arguments in [*commands, ("--version",)]]
    return [
        ProcessSpec(f"p{i}", directory / f"p{i}.log", lambda _, start=start: start, env=env, preload_modules=modules)
        for i, start in enumerate(starts)
    ]


def env_server_arguments(directory) -> tuple[str, ...]:
    """Return a command that does not exit."""
    return ("env-server", "--train.0.taskset.id", "reverse-text", "-b", "http://127.0.0.1:9", "-o", str(directory))


@contextmanager
def prefork(specs):
    """Yield a launcher that has prepared the processes."""
    launcher = LocalLauncher()
    with launcher.prepare(specs):
        yield launcher


def list_fork_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "ramify.processes.prefork" in child.cmdline()]


@asynccontextmanager
async def run_process(spec: ProcessSpec, launcher: LocalLauncher):
    """Start a process, and stop it at the end."""
    process = SupervisedProcess(spec, launcher, build_leases())
    await process.open()
    await process.start()
    try:
        yield process
    finally:
        await process.stop()


async def test_forked_command_has_its_own_title_session_log_and_exit_code(tmp_path):
    help_spec, wrong_spec, _ = build_specs(tmp_path, ("doctor", "--help"), ("serv",))
    with prefork([help_spec, wrong_spec]) as launcher:
        (server,) = wait_until(list_fork_servers, "a fork server")
        async with run_process(help_spec, launcher) as process:
            assert await process.wait_for_exit() == 0
        assert "usage: ramify doctor" in help_spec.log.read_text()
        async with run_process(wrong_spec, launcher) as process:
            assert await process.wait_for_exit() == 2
        assert "did you mean 'ramify serve'" in process.failed_log.tail()
        command_line = (*RAMIFY_COMMAND, *env_server_arguments(tmp_path))
        start = ProcessStart(command_line)
        spec = dataclasses.replace(help_spec, build_start=lambda _: start, log=tmp_path / "serve.log")
        async with run_process(spec, launcher) as process:
            command = psutil.Process(process.pid)
            wait_until(lambda: command.cmdline()[: len(command_line)] == list(command_line))
            watcher = command.parent()
            assert watcher.cmdline()[:4] == [sys.executable, "-m", "ramify.processes.watcher", str(STOP_TIMEOUT)]
            assert watcher.parent() == server
            assert os.getsid(command.pid) == watcher.pid
            assert command.environ()["RAYON_NUM_THREADS"] == "3"
    assert not any(map(is_running, (server, watcher, command)))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
async def test_log_of_a_forked_command_ends_with_its_error(tmp_path):
    """Triton reports what it has leaked at exit if the garbage collector does not free it."""
    wrong_spec, *others = build_specs(tmp_path, ("serv",), modules=("triton",))
    with prefork([wrong_spec, *others]) as launcher:
        async with run_process(wrong_spec, launcher) as process:
            assert await process.wait_for_exit() == 2
    assert "did you mean 'ramify serve'" in process.failed_log.tail().splitlines()[-1]


@pytest.mark.parametrize("victim", ["command", "watcher"])
async def test_kill_is_reported_as_exit_by_signal(tmp_path, victim):
    spec, *others = build_specs(tmp_path, env_server_arguments(tmp_path))
    with prefork([spec, *others]) as launcher:
        async with run_process(spec, launcher) as process:
            command = psutil.Process(process.pid)
            (command if victim == "command" else command.parent()).send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(process.wait_for_exit(), 60) in (-9, 128 + 9)
            wait_until_ended(command)


async def test_process_is_started_directly_without_a_fork_server(tmp_path):
    spec, *others = build_specs(tmp_path, ("--version",), modules=("a_missing_module",))
    with prefork([spec, *others]) as launcher:
        async with run_process(spec, launcher) as process:
            assert await process.wait_for_exit() == 0
        async with run_process(spec, launcher) as process:  # the launcher knows by now that the server is dead
            assert await process.wait_for_exit() == 0
    assert spec.log.read_text().count("ramify ") == 2


async def test_forked_processes_survive_the_fork_server(tmp_path):
    spec, *others = build_specs(tmp_path, env_server_arguments(tmp_path))
    with prefork([spec, *others]) as launcher:
        async with run_process(spec, launcher) as process:
            command = psutil.Process(process.pid)
            server = command.parent().parent()
            server.kill()
            wait_until_ended(server)
            assert command.is_running()
        assert not is_running(command)


def test_fork_server_needs_two_processes_that_import_with_the_same_environment(tmp_path):
    first, second = build_specs(tmp_path, ("--version",))
    for specs in ([first], [first, dataclasses.replace(second, env={})]):
        with prefork(specs):
            assert not list_fork_servers()


async def test_forked_processes_have_variables_of_their_own(tmp_path, monkeypatch):
    """The reserved ports, for example, differ between an engine and a trainer."""
    code = f"import os, sys; print(os.environ.get({RESERVED_PORTS_VARIABLE!r}), 'colorsys' in sys.modules)"
    (tmp_path / "print_ports.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    specs = [
        ProcessSpec(
            name,
            tmp_path / f"{name}.log",
            lambda _: ProcessStart((sys.executable, "-m", "print_ports")),
            env=ENVIRONMENT | variables,
            preload_modules=("colorsys",),
        )
        for name, variables in [("engine", {RESERVED_PORTS_VARIABLE: "5001,5002"}), ("trainer", {})]
    ]
    with prefork(specs) as launcher:
        wait_until(list_fork_servers, "a fork server")  # a process that has just started has no command line
        for spec, output in zip(specs, ("5001,5002 True\n", "None True\n"), strict=True):
            async with run_process(spec, launcher) as process:
                assert await process.wait_for_exit() == 0
            assert spec.log.read_text() == output


async def test_forked_process_has_the_directory_variables_and_files_of_its_parent(tmp_path, monkeypatch):
    code = """
import os, random, sys
facts = (sys.argv[1], os.getcwd(), os.environ.get("RAYON_NUM_THREADS"), random.random())
os.write(int(sys.argv[2]), " ".join(map(str, facts)).encode())
"""
    (tmp_path / "write_facts.py").write_text(code)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    facts = []
    with start_prefork_server(("colorsys", "random"), {}) as client:
        monkeypatch.chdir(tmp_path)  # after the start of the fork server
        monkeypatch.delenv("RAYON_NUM_THREADS")
        for name in ("a", "b"):
            child, command = ChildProcess(), (sys.executable, "-m", "write_facts", name)
            with (tmp_path / "facts").open("w+b") as file, (tmp_path / "log").open("wb") as log:
                fds = [file.fileno()]
                assert await child.spawn_preforked(client, ("colorsys",), command, log.fileno(), pass_fds=fds)
                assert await asyncio.wait_for(child.wait(), 60) == 0, (tmp_path / "log").read_text()
                await child.stop()
                facts.append((tmp_path / "facts").read_text().split())
    assert [words[:3] for words in facts] == [["a", str(tmp_path), "None"], ["b", str(tmp_path), "None"]]
    assert facts[0][3] != facts[1][3]  # each has random numbers of its own


async def test_tcp_address_must_accept_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as queued:
        queued.connect(listener.getsockname())  # fills the queue: a further connection is not answered
        address = "tcp://{}:{}".format(*listener.getsockname())
        async with asyncio.timeout(30):
            assert not await is_responding(address, timeout=0.05)
