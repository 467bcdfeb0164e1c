"""`why`, `metrics` and `plot`: a live run is queried over HTTP, an ended one is read from its files."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.cli.metrics import smooth
from ramify.core.errors import ConfigInvalid
from ramify.launch import python_api
from ramify.launch.execution import RunResult
from ramify.launch.python_api import rl
from ramify.launch.supervisor import RunOutcome
from ramify.model.weights_manifest import Manifest
from ramify.run import supervisor_lock
from ramify.run.reader import get_process_state
from ramify.run.state import ProcessState, ProcessStatus, SupervisorState
from ramify.run.store import RunStore
from ramify.run.store.group_state import DropReason
from ramify.run.store.ledger import GroupRecord, Ledger
from ramify.run.store.run_log import MetricPoint, RunLog
from ramify.run.supervisor_lock import lock_run
from ramify.trace.version import PolicyVersion
from tests.support.processes import wait_until
from tests.support.status import make_state, serve_status

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n"


@pytest.fixture
async def run(tmp_path, monkeypatch):
    """An ended run: one group dropped, three steps of metrics."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs" / "run"

    with RunStore.open(path) as store:
        ledger, journal = Ledger.open(store), RunLog(store)
        await ledger.declare_source("reverse", None)
        await ledger.issue_groups([GroupRecord(0, "reverse", 0, 2)])
        await ledger.drop_group(0, DropReason.FAILED, "ProcessDied")
        for step in range(3):
            journal.log_metrics(
                step,
                {"reward/all/mean": step / 2, "eval/held-out/avg": step / 4, "train/loss": 1.0 if step else math.nan},
            )
        journal.log_event("failure", name="ProcessDied", message="exit code -9").result(10)
    return path


@pytest.mark.parametrize("has_weights", [False, True])
def test_finished_run_prints_its_evals_its_model_and_what_to_do_with_it(run, monkeypatch, capsys, has_weights):
    weights, model_lines, model_commands = run / "weights" / "0-000002", [], []
    if has_weights:
        weights.mkdir(parents=True)
        Manifest(PolicyVersion("tiny", 0, 2), {}).write(weights)
        model_lines = [f"weights: {weights}"]
        model_commands = [f"serve -m {weights}", f"eval reverse-text -m {weights}", f"export {run} --model DIR"]
    monkeypatch.setattr("ramify.cli.rl.rl", lambda *_, **__: RunResult(run, RunOutcome.FINISHED, steps=2))
    assert main(["rl", "reverse-text", "-m", "tiny", "--max-steps", "2"]) == 0
    commands = [*model_commands, f"view {run}", f"plot {run} -o reward.png"]
    assert capsys.readouterr().out.splitlines() == [
        "eval/held-out: 0.000 at step 0 -> 0.500 at step 2",
        f"finished: all 2 steps in {run}",
        *model_lines,
        "next:",
        *(f"  ramify {command}" for command in commands),
    ]


def test_stopped_run_without_a_checkpoint_does_not_claim_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ramify.cli.rl.rl", lambda *_, **__: RunResult(tmp_path / "run", RunOutcome.STOPPED))
    assert main(["rl", "reverse-text", "-m", "tiny"]) == 75
    assert capsys.readouterr().err == "stopped; nothing is finished yet; rerun: ramify rl reverse-text -m tiny\n"


def test_metrics_of_an_ended_run_are_a_list_of_points(run, capsys):
    assert main(["metrics", "run", "--name", "reward/*", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert points == [{"step": step, "name": "reward/all/mean", "value": step / 2} for step in range(3)]


def test_metrics_prints_a_summary_or_points(run, capsys):
    assert main(["metrics", str(run)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].split() == ["name", "points", "first", "last", "min", "max", "curve"]
    rows = {line.split()[0]: line.split()[1:] for line in output[1:4]}
    assert rows["reward/all/mean"][:5] == ["3", "0", "1", "0", "1"]
    assert len(rows["reward/all/mean"][5]) == 3
    assert rows["train/loss"][:5] == ["3", "nan", "1", "1", "1"]
    assert len(rows) == 3 and "--all" in output[-1]
    for points in (["--all"], ["--name", "*"]):
        assert main(["metrics", str(run), *points]) == 0
        output = capsys.readouterr().out.splitlines()
        assert output[0].split() == ["step", "name", "value"]
        assert [line.split() for line in output[1:4]] == [
            ["0", "eval/held-out/avg", "0"],
            ["0", "reward/all/mean", "0"],
            ["0", "train/loss", "nan"],
        ]
        assert len(output) == 10


def test_metrics_of_a_live_run_come_from_its_status_server(run, capsys):
    with serve_status(run), RunStore.open(run):  # its orchestrator holds the database
        assert main(["metrics", "run", "--name", "eval/*/avg", "--json"]) == 0
    assert [point["value"] for point in json.loads(capsys.readouterr().out)] == pytest.approx([0.4, 0.41, 0.42])


def test_pattern_matches_the_same_for_live_and_ended_runs(run, capsys):
    for lives in (serve_status(run), contextlib.nullcontext()):
        with lives:
            assert main(["metrics", "run", "--name", "[!rt]*", "--json"]) == 0
        assert {point["name"] for point in json.loads(capsys.readouterr().out)} == {"eval/held-out/avg"}


def test_why_queries_a_live_run(run, capsys):
    with serve_status(run, failures={"ProcessDied": 3}), RunStore.open(run):
        assert main(["why", "run"]) == 0
    output = capsys.readouterr().out
    assert "run step=7/20" in output
    assert output.index("group 61") < output.index("batch 8")
    assert "2 scored groups" in output
    assert "1800.0" in output
    assert "failed=ProcessDied:3" in output
    assert "3 × ProcessDied, the last: exit code -9\n" in output
    assert "dropped groups: 37 × filtered: zero_advantage\n" in output


def test_why_names_the_nodes_of_a_run_on_a_cluster(run, capsys):
    trainer = ProcessStatus("trainer", ProcessState.SILENT, restarts=1, node="host2, host3")
    with serve_status(run) as address, RunStore.open(run):
        write_supervisor(run, [trainer, ProcessStatus("orchestrator", ProcessState.READY)], status_address=address)
        assert main(["why", "run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trainer", "host2,", "host3", "its", "node", "does", "not", "answer", "1"] in lines
    assert ["orchestrator", "head", "ready", "0"] in lines


def test_why_of_an_ended_run_reads_its_files(run, capsys):
    log = run / "logs" / "trainer.log"
    log.parent.mkdir()
    log.write_text("step 3\nProviderError: gone\n")
    write_supervisor(run, [ProcessStatus("trainer", ProcessState.ENDED, log=str(log))])
    assert main(["why", "run"]) == 0
    output = capsys.readouterr().out
    assert "is stopped: 0 steps committed" in output
    assert "groups: 1 dropped\ndropped groups: 1 × failed: ProcessDied\n" in output
    assert "failure name=ProcessDied message=exit code -9" in output
    assert "ProviderError: gone" in output


def test_why_of_an_interrupted_run_begins_with_the_command_that_resumes_it(run, capsys):
    make_state(run).write(run)  # written before the last steps were committed
    (run / "config.toml").write_text("[[train]]\n")
    with RunStore.open(run) as store:
        RunLog(store).log_event("interrupted").result(10)
    assert main(["why", "run"]) == 0
    headline, second, *others = capsys.readouterr().out.splitlines()
    assert headline.startswith("outputs/run is interrupted: 0 steps committed")
    assert second == "resume with: ramify rl @ outputs/run/config.toml"
    assert not [line for line in others if "last state" in line]


def test_audit_reports_problems_or_none(run, capsys):
    assert main(["why", "run", "--audit"]) == 0
    assert "1 group, 0 steps: no problems" in capsys.readouterr().out
    with RunStore.open(run) as store:
        store.submit_change(lambda connection: connection.execute("UPDATE groups SET reason = NULL")).result(10)
    assert main(["why", "run", "--audit"]) == 1
    assert "group 0 was dropped without a reason" in capsys.readouterr().out


def test_why_of_a_run_in_use_without_a_state_names_the_process_and_does_not_fail(run, capsys):
    with RunStore.open(run):
        assert main(["why", "run"]) == 0
    output = capsys.readouterr().out
    assert "state=starting" in output and f"is in use by process {os.getpid()}" in output


PROCESSES = [ProcessStatus("inference/0", ProcessState.STARTING), ProcessStatus("orchestrator", ProcessState.WAITING)]
PROCESS_ROWS = {"inference/0 starting 0", "orchestrator waiting 0"}
GONE = 2**22 + 1  # the pid of no process


def write_supervisor(run: Path, processes=PROCESSES, **fields) -> None:
    """Write `supervisor.json` as a supervisor with this pid does."""
    state = SupervisorState(**{"pid": os.getpid(), "started": time.time(), **fields})
    state.with_processes(processes).write(run)


def read_rows(capsys) -> tuple[str, set[str]]:
    """Return the first line that was printed, and the rows of the table after it."""
    first, *lines = capsys.readouterr().out.splitlines()
    return first, {" ".join(line.split()) for line in lines[1:]}


@pytest.mark.parametrize("has_state", [False, True])
def test_why_of_a_run_that_starts_shows_its_processes(run, capsys, has_state):
    if has_state:
        make_state(run, pid=GONE).write(run)  # of an orchestrator that has crashed and starts again
    with lock_run(run):
        for pid, rows in ((os.getpid(), PROCESS_ROWS), (GONE, set())):
            write_supervisor(run, pid=pid)
            for is_open in (False, True):  # whether the orchestrator holds the database
                with RunStore.open(run) if is_open else contextlib.nullcontext():
                    assert main(["why", "run"]) == 0
                line, found_rows = read_rows(capsys)
                assert line.startswith(f"outputs/run state=starting: `ramify rl`, process {os.getpid()}, is running")
                assert found_rows == rows
    assert main(["why", "run"]) == 0
    assert "is stopped: 0 steps committed" in capsys.readouterr().out


def test_why_does_not_take_the_state_of_an_earlier_start_with_the_same_pid(run, capsys):
    with lock_run(run):
        write_supervisor(run, [ProcessStatus("orchestrator", ProcessState.ENDED)], started=time.time() - 60)
        make_state(run, time=time.time() - 30).write(run)
        assert main(["why", "run"]) == 0
    line, rows = read_rows(capsys)
    assert "state=starting" in line and rows == set()


@pytest.mark.parametrize(("age", "rows"), [(0, PROCESS_ROWS), (60, set())])
def test_why_of_a_run_that_starts_in_another_container_shows_its_processes(run, capsys, monkeypatch, age, rows):
    monkeypatch.setattr(supervisor_lock, "find_writer", lambda path: 0)
    with lock_run(run):
        write_supervisor(run, pid=7, started=time.time() - age)
        assert main(["why", "run"]) == 0
    line, found_rows = read_rows(capsys)
    assert line.startswith("outputs/run state=starting: `ramify rl`, in another container, is running")
    assert found_rows == rows


@pytest.mark.process  # asks for the GPUs of this machine
@pytest.mark.parametrize("first_check", ["build_plan", "check_run"])
def test_why_of_a_resumed_run_shows_it_as_starting_during_its_checks(run, capsys, monkeypatch, first_check):
    def check(*_, **__):
        assert main(["why", "run"]) == 0
        raise ConfigInvalid("a wrong key")

    monkeypatch.setattr(python_api, first_check, check)
    cluster = {"launcher": "ray" if first_check == "check_run" else "local"}
    train = [{"taskset": {"id": "reverse-text"}}]
    with pytest.raises(ConfigInvalid, match="a wrong key"):
        rl({"name": "run", "train": train, "cluster": cluster})
    assert "outputs/run state=starting: `ramify rl`, process " in capsys.readouterr().out
    with pytest.raises(ConfigInvalid):
        rl({"name": "new", "output": "other", "train": train, "cluster": cluster})
    assert not Path("other").exists()


def test_audit_of_a_run_in_use_says_that_it_needs_a_stopped_run(run, capsys):
    with RunStore.open(run):
        assert main(["why", "run", "--audit"]) == 1
    message = capsys.readouterr().err
    assert f"in use by process {os.getpid()}; the audit needs a stopped run" in message
    assert "`ramify why outputs/run`" in message


HOLDS = """
import sys
from pathlib import Path
from ramify.run.store import RunStore
from tests.support.status import make_state
path = Path(sys.argv[1])
with RunStore.open(path):
    make_state(path).write(path)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_why_shows_the_last_state_of_an_unresponsive_orchestrator(run, capsys):
    log = run / "logs" / "orchestrator.log"
    log.parent.mkdir()
    log.write_text("step 6: reward 0.625\n")
    write_supervisor(run, [ProcessStatus("orchestrator", ProcessState.READY, log=str(log))])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert main(["why", "run"]) == 0
        assert f"does not respond at its status address: process {holder.pid}, running\n" in capsys.readouterr().out
        holder.send_signal(signal.SIGSTOP)
        wait_until(lambda: get_process_state(holder.pid) == "stopped")
        assert main(["why", "run"]) == 0
        output = capsys.readouterr().out
        assert f"process {holder.pid}, stopped\ncontinue it with: kill -CONT {holder.pid}\nlast state, " in output
        assert "run step=7/20" in output
        assert "2 scored groups" in output
        assert "dropped groups: 37 × filtered: zero_advantage" in output
        assert "step 6: reward 0.625" in output
    finally:
        holder.kill()
        holder.communicate()
    assert main(["why", "run"]) == 0
    output = capsys.readouterr().out
    assert "is stopped: " in output
    assert f"the orchestrator, process {holder.pid}, has exited; last state, " in output


def test_plot_writes_an_image(run, tmp_path, capsys):
    assert main(["plot", "run", str(run), "-o", "pictures/reward.png"]) == 0
    assert (tmp_path / "pictures" / "reward.png").read_bytes().startswith(PNG)
    assert main(["plot", "run", "--name", "nothing/*", "-o", "reward.png"]) == 2
    assert "no run has nothing/*" in capsys.readouterr().err
    for path in ("reward.nonsense", "reward"):
        assert main(["plot", "run", "-o", path]) == 2
    assert ".png" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_plot_labels_runs_with_the_same_name_by_path(run, tmp_path, monkeypatch):
    drawn: dict[str, list[MetricPoint]] = {}
    monkeypatch.setattr("ramify.cli.metrics.plot_metrics", lambda points, _: drawn.update(points))
    shutil.copytree(run, tmp_path / "elsewhere" / "run")
    shutil.copytree(run, tmp_path / "other")
    assert main(["plot", "run", "elsewhere/run", "other", "-o", "reward.png"]) == 0
    assert {label: len(points) for label, points in drawn.items()} == {"outputs/run": 6, "elsewhere/run": 6, "other": 6}


def test_unwritable_export_is_a_named_failure(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["export", "run", "--to", "jsonl", "-o", str(tmp_path / "file" / "x.jsonl")]) == 1
    assert "StorageFailed" in capsys.readouterr().err


def test_why_refuses_sft_and_eval_runs(run, capsys):
    (run / "config.toml").write_text("[data]\n")  # a run of `ramify sft`
    assert main(["why", "run"]) == 2
    assert "is not an RL run; use 'ramify metrics' for it" in capsys.readouterr().err
    assert main(["why", "run", "--audit"]) == 0  # its files can be checked
    (run / "config.toml").write_text("[taskset]\n")  # a run of `ramify eval`
    assert main(["why", "run"]) == 2
    assert "is not an RL run; use 'ramify show' for it" in capsys.readouterr().err
    (run / "config.toml").write_text("[[train]]\n")
    assert main(["why", "run"]) == 0
    assert main(["replay", "run"]) == 2
    assert "is not an eval run" in capsys.readouterr().err


def test_why_reads_the_ledger_if_other_files_are_broken(run, capsys):
    (run / "config.toml").write_text("[[train]\n")
    (run / "supervisor.json").write_text("[]")
    for args in (["why", "run"], ["why", "run", "--audit"], ["metrics", "run"]):
        assert main(args) == 0
    assert "1 group, 0 steps: no problems" in capsys.readouterr().out


def test_rolling_mean_does_not_shift_the_curve():
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], window=3) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert smooth([0.0, 3.0, 0.0], window=9) == [0.0, 1.0, 0.0]
