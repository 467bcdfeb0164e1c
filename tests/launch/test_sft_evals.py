"""`ramify sft` with `[[eval]]`: the same results as in an RL run, at step 0, every interval and at the end."""

import contextlib
import json
import threading
from pathlib import Path

import pytest

import ramify as rf
from ramify.cli import main
from ramify.core.errors import ConfigInvalid, OperationInvalid
from ramify.launch.sft_evals import RolloutEvals
from ramify.model.resolve import resolve_model_path
from ramify.run.store import Ledger, RunStore
from ramify.run.store.run_log import RunLog
from ramify.train.sft import SftConfig, run_sft

SOURCE = {"taskset": {"id": "reverse-text", "split": "eval"}, "sampling": {"max_tokens": 8}, "num_tasks": 3}


def build_config(home: Path, **more) -> SftConfig:
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("hello", "moin", "salut", "ciao")]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "run",
        "output": home,
        "data": {"path": str(home / "rows.jsonl")},
        "batch_size": 1,
        "max_steps": 3,
        "seq_len": 128,
        "eval": [{**SOURCE, "name": "words", "interval": 2}],
        "inference": {"threads": 1},
        "trainer": {"device": "cpu", "threads": 1},
    }
    return SftConfig.model_validate({**settings, **more})


@contextlib.contextmanager
def open_evals(home: Path):
    evals = RolloutEvals(build_config(home))
    with RunStore.open(home / "run") as store:
        Ledger.open(store)
        evals.open(store, print)
        yield evals, store


@pytest.mark.process
@pytest.mark.full("starts an engine, as the eval of tests/cli/test_eval.py does")
def test_an_eval_stores_its_rollouts_and_metrics_as_in_an_rl_run(tmp_path, capsys):
    with open_evals(tmp_path) as (evals, store):
        assert evals.get_due_sources(0) == ["words"]
        evals.run(4, ["words"], resolve_model_path("tiny"), threading.Event())
        assert [evals.get_due_sources(step) for step in (4, 5, 6)] == [[], [], ["words"]]
        assert evals.get_due_sources(5, is_last=True) == ["words"]
        assert {row.id for row in store.rollouts(source="eval/words")} == {f"eval.words.4.{n}.0" for n in range(3)}
    assert "eval at step 4: eval/words/avg 0." in capsys.readouterr().out
    run = str(tmp_path / "run")
    assert main(["metrics", run, "--name", "eval/*/avg"]) == 0
    assert main(["show", run, "--source", "eval/words"]) == 0
    out = capsys.readouterr().out
    assert "eval/words/avg" in out and "eval.words.4.0.0" in out


@pytest.mark.process
@pytest.mark.full("20 s of CPU time")
def test_evals_run_at_step_0_every_interval_and_at_the_end(tmp_path):
    config = build_config(tmp_path)
    rf.sft(config)
    run = tmp_path / "run"
    with RunStore.open(run, write=False) as store:
        averages = RunLog(store).metrics("eval/words/avg")
        assert [metric.step for metric in averages] == [0, 2, 3]
        rollouts = store.rollouts(source="eval/words")
        assert len(rollouts) == 9 and {rollout.failure for rollout in rollouts} == {None}
        versions = {row.summary["step"]: store.read_traces(row.id)[0].nodes[-1].versions[0] for row in rollouts}
        assert {step: version.step for step, version in versions.items()} == {0: 0, 2: 2, 3: 3}  # the step's weights
    assert sorted(path.name for path in (run / "weights").iterdir()) == ["0-000003"]
    assert rf.sft(config).steps_run == 0  # nothing is due


def test_an_eval_that_is_stopped_is_due_again(tmp_path):
    stop = threading.Event()
    stop.set()
    with open_evals(tmp_path) as (evals, store):
        evals.run(0, ["words"], resolve_model_path("tiny"), stop)
        assert evals.get_due_sources(0) == ["words"]
        assert not store.rollouts()


def test_settings_of_other_weights_are_refused(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"eval\.0\.endpoint"):
        rf.sft(build_config(tmp_path).model_dump() | {"eval": [{**SOURCE, "endpoint": {"base_url": "http://a:1"}}]})
    with pytest.raises(OperationInvalid, match=r"rf\.sft"):
        run_sft(build_config(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        pytest.param(
            "--eval.0.taskset.id=reverse",
            "eval.0.taskset.id: unknown taskset 'reverse'; did you mean 'reverse-text'?",
            marks=pytest.mark.full("is checked in a process as the key below"),
        ),
        ("--eval.0.taskset.splitt=eval", "eval.0.taskset.splitt: unknown key; did you mean eval.0.taskset.split?"),
    ],
)
def test_a_wrong_taskset_is_refused_before_the_run_starts(tmp_path, capsys, flag, message):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "sft.toml").write_text('[[eval]]\ntaskset = { id = "reverse-text" }\n')
    arguments = [
        "@",
        str(tmp_path / "sft.toml"),
        "-m",
        "tiny",
        "-d",
        str(tmp_path / "chats.jsonl"),
        "-o",
        str(tmp_path),
    ]
    assert main(["sft", *arguments, flag]) == 2
    assert message in capsys.readouterr().err
