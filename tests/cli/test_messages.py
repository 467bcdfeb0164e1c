"""Messages of commands for a wrong command line, a busy run, or a run that ends early."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.cli.run_lookup import describe_resume
from ramify.core.errors import RunBusy
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.ledger import Ledger
from ramify.run.supervisor_lock import lock_run
from ramify.trace import Trace
from tests.support.engine import ScriptedEngine, reverse_some, run_engine

HOLDER = """
import sys
from pathlib import Path
{imports}
with {held}:
    print("held", flush=True)
    sys.stdin.read()
"""
INTERRUPTED = """
import os, signal
import ramify as rf

class Interrupted(rf.Taskset):
    def load(self):
        for number in range(3):
            yield rf.Task(prompt=f"task {{number}}", number=number)

    def setup(self, task):
        if task.number == {at}:
            os.kill(os.getpid(), signal.SIGINT)

    @rf.reward
    def one(self, trace):
        return 1.0
"""


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


@contextlib.contextmanager
def holder(imports: str, held: str):
    """Start another process that holds a run; yield its pid."""
    command = [sys.executable, "-c", HOLDER.format(imports=imports, held=held)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.communicate("", timeout=60)


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rl reverse-text --max_step 5", "unknown flag --max_step; did you mean --max_steps?"),
        ("rl reverse-text --fresch", "unknown flag --fresch; did you mean --fresh?"),
        ("eval reverse-text --dryrun", "unknown flag --dryrun; did you mean --dry-run?"),
        ("eval reverse-text -z 3", "unknown flag -z"),
        ("eval -z 3", "unknown flag -z"),
        ("sft --dryrun", "unknown flag --dryrun; did you mean --dry-run?"),
        ("serve --dryrun", "unknown flag --dryrun; did you mean --dry-run?"),
        ("why run --auditt", "unknown flag --auditt; did you mean --audit?"),
        ("show --ful", "required: RUN"),
        ("show --fulll", "unknown flag --fulll; did you mean --full?"),
    ],
)
def test_unknown_flag_suggests_the_nearest(command, message, capsys):
    try:
        assert main(command.split()) == 2
    except SystemExit as ended:  # raised by argparse
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_a_second_dataset_flag_is_refused(capsys):
    assert main(["sft", "-d", "a.jsonl", "-d", "b.jsonl"]) == 2
    assert "-d: is given twice; write several datasets as [[data]] tables in a file" in capsys.readouterr().err


# -- models and tasksets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"), [("my_env", "my_env.py"), ("my-env", "my_env.py"), ("my_env", "my_env/my_env.py")]
)
def test_taskset_without_suffix_suggests_the_file(name, file, capsys):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("")
    assert main(["eval", name, "-m", "tiny"]) == 2
    assert f"unknown taskset {name!r}; did you mean {file}?" in capsys.readouterr().err


# -- runs in use -------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux says who holds a lock that others share")
def test_busy_run_names_a_reading_process(tmp_path):
    RunStore.open(Path("run")).close()  # so that this process is the last writer
    with (
        holder("from ramify.run.store import RunStore", "RunStore.open(Path('run'), write=False)") as pid,
        pytest.raises(RunBusy, match=rf"run is in use by process {pid}\b") as caught,
    ):
        RunStore.open(Path("run"))
    assert str(os.getpid()) not in caught.value.message


@pytest.mark.process
def test_supervised_run_names_its_supervisor():
    with (
        holder("from ramify.run.supervisor_lock import lock_run", "lock_run(Path('outputs/run'))") as pid,
        pytest.raises(RunBusy, match=rf"by another `ramify rl`, process {pid}\b"),
        lock_run(Path("outputs/run")),
    ):
        pass


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "kept"), [(0, None), (2, "2 rollouts kept")])
def test_interrupted_eval_prints_what_is_kept(engine, at, kept, capsys):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    Path("env.py").write_text(INTERRUPTED.format(at=at))
    assert main(["eval", "env.py", "-m", "tiny", "-b", engine.url, "-c", "1", "-r", "1", "--name", "run"]) == 130
    message = capsys.readouterr().err
    assert "ramify eval env.py" in message
    assert kept in message if kept else "kept" not in message


async def record_rollouts(path: Path, count: int) -> None:
    with RunStore.open(path) as store:
        Ledger.open(store)
        for number in range(count):
            await store.add_rollout(RolloutRecord(f"{number}.0", task=str(number)), [Trace(id=str(number))])


@pytest.mark.parametrize(
    ("count", "message"),
    [(0, "nothing is finished yet; rerun: ramify rl"), (2, "2 rollouts kept; resume with: ramify rl")],
)
async def test_training_run_prints_what_is_kept(count, message):
    assert describe_resume(Path("run"), "ramify rl") == "nothing is finished yet; rerun: ramify rl"
    await record_rollouts(Path("run"), count)
    assert describe_resume(Path("run"), "ramify rl") == message


async def test_unreadable_run_does_not_hide_the_failure():
    await record_rollouts(Path("run"), 2)
    with RunStore.open(Path("run")):
        assert describe_resume(Path("run"), "ramify rl") == "finished work is kept; resume with: ramify rl"


def test_run_that_cannot_be_created_does_not_claim_to_keep_anything(engine, capsys):
    Path("outputs").write_text("a file where a directory is needed")
    assert main(["eval", "reverse-text", "-m", "tiny", "-b", engine.url, "-n", "1", "-r", "1"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("StorageFailed: outputs/") and "kept" not in message


def test_configuration_of_rl_is_refused_by_eval_in_one_line(tmp_path, capsys):
    (tmp_path / "rl.toml").write_text('[[train]]\ntaskset = { id = "reverse-text" }\n[orchestrator]\nbatch_size = 4\n')
    assert main(["eval", "@", str(tmp_path / "rl.toml"), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "configuration of `ramify rl`, since it has a `train` table" in line
