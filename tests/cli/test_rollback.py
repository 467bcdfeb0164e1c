"""`ramify rollback` ends a run's history at an older checkpoint, and changes nothing if it cannot."""

from pathlib import Path

import pytest

from ramify.cli import main
from ramify.launch.run_directory import FINISHED_KEY
from ramify.run.fencing.token import FencingToken
from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.ledger import Ledger, LedgerProgress
from ramify.run.store.run_log import RunLog
from ramify.train.checkpoint_manifest import CheckpointManifest, checksum_files, get_step_directory
from tests.support.ledgers import write_finished_run


def save_checkpoint(run: Path, step: int) -> Path:
    """Write a checkpoint of one small file."""
    directory = get_step_directory(run / "checkpoints", step, FencingToken())
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(bytes(range(200)))
    files = checksum_files([directory / "__0_0.distcp"])
    CheckpointManifest(step=step, optimizer="adamw", note={}, files=files).write(directory)
    return directory


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of four steps with two checkpoints, the last of them damaged."""
    write_finished_run(tmp_path / "run")
    save_checkpoint(tmp_path / "run", 2)
    (save_checkpoint(tmp_path / "run", 4) / "__0_0.distcp").write_bytes(bytes(200))
    return tmp_path / "run"


def test_why_shows_the_rollback_and_how_to_resume(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    (run / "config.toml").write_text('output = "."\n[[train]]\n')
    assert main(["rollback", "run", "2"]) == 0
    resume = "resume with: ramify rl @ run/config.toml\n"
    assert f"run is rolled back to step 2; {resume}" in capsys.readouterr().out
    assert main(["why", "run"]) == 0
    headline, second, *others = capsys.readouterr().out.splitlines(keepends=True)
    assert headline.startswith("run is rolled back to step 2: 2 steps committed")
    assert second == resume
    assert others[-1].endswith("rolled_back committed=4 step=2\n")
    monkeypatch.chdir("/")  # `output` of the configuration is another directory here
    assert main(["why", str(run)]) == 0
    assert f"resume with: ramify rl @ {run}/config.toml -o {run.parent}\n" in capsys.readouterr().out


def test_rollback_ends_the_history_at_the_step(run, capsys):
    assert main(["rollback", str(run), "2"]) == 0
    out = capsys.readouterr().out
    assert "is rolled back to step 2; rerun the command" in out
    assert "steps 2 to 3 are trained again" in out
    assert "rolled_back_1.step_000004-0" in out
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "rolled_back_1.step_000004-0",
        "step_000002-0",
    ]
    with RunStore.open(run) as store:
        ledger = Ledger.open(store)
        assert ledger.progress() == LedgerProgress(committed=2, acknowledged=2, incarnation=1)
        assert audit(ledger, finished=False) == []
        assert store.get_fact(FINISHED_KEY) is None
        assert [event.fields for event in RunLog(store).events("rolled_back")] == [{"committed": 4, "step": 2}]
    assert main(["rollback", str(run), "2"]) == 0  # idempotent
    with RunStore.open(run, write=False) as store:
        assert Ledger.open_readonly(store).progress().incarnation == 1
        assert store.get_fact(FINISHED_KEY) is None


def test_evals_of_later_steps_are_due_again(run):
    with RunStore.open(run) as store:
        for step in (2, 4):
            RunLog(store).log_metrics(step, {"eval/held-out/avg": 0.5, "train/loss": 1.0}).result(timeout=30)
    assert main(["rollback", str(run), "2"]) == 0
    with RunStore.open(run, write=False) as store:
        assert RunLog(store).values_by_step("eval/held-out/avg") == {2: 0.5}
        assert 4 in RunLog(store).values_by_step("train/loss")


def test_exported_models_of_later_steps_are_renamed(run, capsys):
    models = run / "models"
    for name in ("run-000002", "run-000004", "notes", "run-4"):
        (models / name).mkdir(parents=True)
    assert main(["rollback", str(run), "2"]) == 0
    assert sorted(path.name for path in models.iterdir()) == [
        "notes",
        "rolled_back_1.run-000004",
        "run-000002",
        "run-4",
    ]
    assert f"kept; remove it when you do not need it: {models}/rolled_back_1.run-000004" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "code", "reason"),
    [
        ("4", 1, "__0_0.distcp is damaged"),
        ("3", 1, "has no checkpoint of step 3; checkpoints of the run: 2, 4, 6"),
        ("6", 2, "history ends at step 4"),
    ],
)
def test_unusable_step_changes_nothing(run, capsys, step, code, reason):
    save_checkpoint(run, 6)  # saved, but never committed
    assert main(["rollback", str(run), step]) == code
    assert reason in capsys.readouterr().err
    with RunStore.open(run) as store:
        assert Ledger.open(store).progress() == LedgerProgress(committed=4, acknowledged=4)
    assert len(list((run / "checkpoints").glob("step_*"))) == 3


def test_busy_run_is_not_changed(run, capsys):
    with RunStore.open(run):
        assert main(["rollback", str(run), "2"]) == 1
    assert "RunBusy" in capsys.readouterr().err
