"""`ramify show`: pages of rollouts, filtered and sorted, without reading traces; and the progress of `export`."""

import random
import re
import shutil

import pytest

from ramify.cli import export as export_command
from ramify.cli.app import main
from ramify.run.store import RolloutRecord, RunStore
from tests.support.traces import make_rollout

COUNT = 1200
HELD_OUT = "eval/held-out"


def row(number: int, source: str = "train") -> RolloutRecord:
    """Return row `number`: every tenth has a system failure, every seventh exceeded its budget."""
    failure = "EnvironmentFault" if number % 10 == 3 else None
    summary = {
        "stop": "BudgetExceeded" if number % 7 == 0 else "stop",
        "errors": {"BudgetExceeded": 1} if number % 7 == 0 else {},
        "output": number,
        "calls": 1,
        "rewards": {"right": 0.5},
        "weights": {"right": 1.0},
        "timing": {"harness": 1.0},
    }
    reward = None if failure else REWARDS[number] / 1000
    return RolloutRecord(f"{number}.0", f"task-{number // 4:04}", number % 4, source, reward, failure, summary)


REWARDS = list(range(COUNT))
random.Random(0).shuffle(REWARDS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A run with many rollouts whose traces are missing, so that reading one would fail."""
    path = tmp_path_factory.mktemp("run")
    _, traces = make_rollout()
    with RunStore.open(path) as store:
        rows = [*map(row, range(COUNT)), RolloutRecord("held-out.0", "a", 0, HELD_OUT, 1.0)]
        store.submit_change(lambda *_: None, [(row, traces) for row in rows]).result(60)
    shutil.rmtree(path / "traces")
    return path


@pytest.fixture
def show(path, capsys):
    """Run `ramify show` and return (ids of the rollouts in order, everything that was printed)."""

    def shown(*args: str) -> tuple[list[str], str]:
        assert main(["show", str(path), *args]) == 0
        output = capsys.readouterr().out
        return re.findall(r"^(\S+\.0) ", output, re.MULTILINE), output

    return shown


def test_first_page_is_shown_with_a_hint(show):
    ids, output = show()
    assert len(ids) == 20
    assert len(output.splitlines()) < 50
    assert "--page 2" in output and "--limit 0" in output
    assert "1081 counted, 120 failed" in output  # the report covers all rollouts
    following, _ = show("--page", "2")
    both, _ = show("--limit", "40")
    assert ids + following == both
    last, output = show("--page", "61")
    assert len(last) == 1
    assert "--page" not in output


def test_worst_and_best_order(show):
    rewards = {f"{number}.0": row(number).reward for number in range(COUNT)} | {"held-out.0": 1.0}
    counted = sorted((reward, id) for id, reward in rewards.items() if reward is not None)
    worst, _ = show("--worst", "--limit", "5")
    assert worst == [id for _, id in counted[:5]]
    assert show("--worst", "--limit", "5", "--page", "2")[0] == [id for _, id in counted[5:10]]
    best, _ = show("--best", "--limit", "5")
    assert best == [id for _, id in counted[::-1][:5]]


def test_source_filter_and_unknown_source(show, path, capsys):
    ids, output = show("--source", HELD_OUT)
    assert ids == ["held-out.0"]
    assert "1 counted, 0 failed" in output
    assert main(["show", str(path), "--source", "held-out"]) == 2
    assert "no rollouts of source 'held-out'; the run has eval/held-out, train" in capsys.readouterr().err


def test_failed_filter_includes_system_and_policy_failures(show):
    ids, output = show("--failed", "--limit", "0")
    assert sorted(ids) == sorted(f"{number}.0" for number in range(COUNT) if number % 10 == 3 or number % 7 == 0)
    assert "EnvironmentFault" in output and "BudgetExceeded" in output
    ids, output = show("--failed", "--source", HELD_OUT)
    assert ids == []
    assert "no failed rollouts" in output


def test_contradicting_flags_are_refused(path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["show", str(path), "--worst", "--best"])
    for args in (["--page", "0"], ["--limit", "-1"], ["7.0", "--worst"]):
        assert main(["show", str(path), *args]) == 2
        assert capsys.readouterr().err


def test_rollout_is_found_by_id_prefix(tmp_path, capsys):
    with RunStore.open(tmp_path / "run") as store:
        rows = list(map(make_rollout, range(12)))
        store.submit_change(lambda *_: None, rows).result(60)
    assert main(["show", str(tmp_path / "run"), "r11"]) == 0
    assert "reply 11" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "r1"]) == 0  # an exact id wins over the prefix of r10 and r11
    assert "reply 1\n" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "r"]) == 2
    assert "matches several rollouts: r0, r1, r10" in capsys.readouterr().err


def test_export_reports_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export_command, "PROGRESS_INTERVAL", 0.0)
    with RunStore.open(tmp_path / "run") as store:
        rows = list(map(make_rollout, range(3)))
        store.submit_change(lambda *_: None, rows).result(60)
    assert main(["export", str(tmp_path / "run"), "--to", "jsonl"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == [f"{number} of 3 rollouts exported" for number in (1, 2, 3)]
    assert output.out.startswith("3 traces in ")
