"""`ramify eval` with code that never returns, or that ends its process: it ends with a named failure, or on SIGTERM."""

import signal
import subprocess
from pathlib import Path

import pytest

from ramify.cli import main
from tests.rollout.evals import environments
from tests.support.engine import ScriptedEngine, reverse_some, run_engine
from tests.support.processes import wait_until
from tests.support.runs import command

pytestmark = pytest.mark.process

BLOCKING = f"{environments.__file__}:Blocking"
TIMEOUT = 60.0  # seconds; the limits that are tested are shorter


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


def build_arguments(engine, folder: Path, where: str, *more: str) -> list[str]:
    arguments = ["eval", BLOCKING, "-m", "tiny", "-b", engine.url, "-n", "2", "-r", "1", "--name", "run"]
    return [*arguments, "--taskset.where", where, "--taskset.begun", str(folder / "begun"), *more]


def start(*args) -> subprocess.Popen[str]:
    arguments, folder = build_arguments(*args), args[1]
    return subprocess.Popen(
        command(*arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(eval: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output."""
    try:
        output, _ = eval.communicate(timeout=TIMEOUT)
    finally:
        eval.kill()
    return eval.returncode, output


def test_blocking_load_is_deadline_exceeded_with_a_stack(engine, tmp_path):
    exit_code, output = end(start(engine, tmp_path, "load", "--timeouts.load", "1"))
    assert exit_code == 1, output
    load = "load of taskset environments:Blocking"
    assert f"DeadlineExceeded: {load} took longer than 1 s (timeouts.load); its current stack:" in output
    assert "time.sleep(900)" in output


def test_setup_that_blocks_the_event_loop_is_worker_died_with_a_stack(engine, tmp_path):
    exit_code, output = end(start(engine, tmp_path, "setup", "--hang_timeout", "2"))
    assert exit_code == 1, output
    assert "ProcessDied: hung: the event loop was blocked for " in output
    assert "time.sleep(900)" in output
    assert "resume with: ramify eval " in output


@pytest.mark.full("ten seconds; the tests below end code that blocks")
def test_code_that_holds_the_interpreter_lock_is_ended(engine, tmp_path):
    exit_code, output = end(start(engine, tmp_path, "regex", "--hang_timeout", "1"))
    assert exit_code == 1, output
    assert "in setup" in output


@pytest.mark.parametrize(
    "where", [pytest.param("load", marks=pytest.mark.full("the main thread waits as in any eval")), "setup"]
)
def test_sigterm_ends_an_eval_whose_code_blocks(engine, tmp_path, where):
    eval = start(engine, tmp_path, where)
    wait_until(lambda: (tmp_path / "begun").exists() or eval.poll() is not None, timeout=TIMEOUT)
    eval.send_signal(signal.SIGTERM)
    exit_code, output = end(eval)
    assert exit_code == 130, output
    assert "interrupted; " in output
    assert ("time.sleep(900)" in output) == (where == "setup")  # a blocked load does not block the loop


@pytest.mark.parametrize(
    ("where", "expected_code", "ending"),
    [
        pytest.param("exit", 1, "ended with exit code 0", marks=pytest.mark.full("ends as a crash does")),
        ("crash", 139, "was killed by SIGSEGV"),
    ],
)
def test_code_that_ends_its_process_is_worker_died_with_its_rollouts(engine, tmp_path, where, expected_code, ending):
    exit_code, output = end(start(engine, tmp_path, where, "-c", "1"))
    assert exit_code == expected_code, output
    assert f"ProcessDied: the process of this eval {ending} while it ran task-0.0 (setup); " in output
    assert "the same command runs the others" in output
    assert (where == "crash") == ("in setup" in output)


def test_keyboard_interrupt_of_the_code_is_an_environment_fault(engine, tmp_path, capsys):
    assert main(build_arguments(engine, tmp_path, "interrupt", "-o", str(tmp_path))) == 1
    assert "EnvironmentFault: setup: KeyboardInterrupt (" in " ".join(capsys.readouterr().out.split())
