"""`ramify rl` and `ramify sft` on a dataset by name: progress, a broken download, a pinned revision, offline."""

import tomllib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.hub import FakeHub, serve_hub
from tests.support.runs import read_values, run_command

pytestmark = [pytest.mark.run, pytest.mark.promise]

NAME = "org/words"
RL = f"""
name = "rl"
max_steps = 1
seq_len = 256

[orchestrator]
batch_size = 4
group_size = 2

[sampling]
max_tokens = 12

[[train]]
taskset = {{ id = "dataset", path = "{NAME}", part = "train", reward = "score.py:score", eval_share = 0 }}

[[eval]]
num_tasks = 2
[eval.taskset]
id = "dataset"
path = "{NAME}"
part = "test"
split = "eval"
reward = "score.py:score"
eval_share = 1
"""
SFT = f"""
name = "sft"
max_steps = 1
batch_size = 2

[data]
path = "{NAME}"
part = "train"
completion_column = "answer"

[validation]
path = "{NAME}"
part = "dev"
"""


def make_files(directory: Path, word: str) -> dict[str, bytes]:
    """Return a dataset with three splits in Parquet."""
    files: dict[str, bytes] = {}
    for part in ("train", "test", "dev"):
        rows = [{"prompt": f"{word} {part} {number}", "answer": "yes"} for number in range(8)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "rows.parquet")
        files[f"data/{part}-00000-of-00001.parquet"] = (directory / "rows.parquet").read_bytes()
    return files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "rl.toml").write_text(RL)
    (tmp_path / "sft.toml").write_text(SFT)
    (tmp_path / "score.py").write_text("def score(task, trace):\n    return len(trace.last_reply) % 7 / 7\n")
    with serve_hub() as server:
        server.add("datasets", NAME, make_files(tmp_path, "old"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


def read_config(run: Path) -> dict:
    return tomllib.loads((run / "config.toml").read_text())


def check_later_starts(hub: FakeHub, home: Path, command: list[str], flag: str, monkeypatch) -> None:
    """Check that a run whose dataset has moved on continues offline, and that another revision is refused by name."""
    repo = hub.repos["datasets", NAME]
    first, second = repo.refs["main"], repo.commit(make_files(home, "new"))
    hub.sent.clear()
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        result = run_command(*command, cwd=home)
    assert result.returncode == 0 and "is already finished" in result.stdout, result.stdout + result.stderr
    assert hub.sent == []
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "cache of another machine"))
    result = run_command(*command, flag, "main", cwd=home)
    assert result.returncode == 2
    assert f"{NAME} at 'main' is now {second[:12]}, but this run has read {first[:12]}" in result.stderr
    assert flag.removeprefix("--") in result.stderr


@pytest.mark.full("twenty seconds; tests/launch/test_pinned_datasets.py tests the same in one process")
def test_rl_by_name(hub, tmp_path, monkeypatch):
    first = hub.repos["datasets", NAME].refs["main"]
    command = ["rl", "@", "rl.toml", "-m", "tiny"]
    result = run_command(*command, "--dry-run", cwd=tmp_path)
    assert result.returncode == 0 and f"the run downloads {NAME} when it starts" in result.stdout
    assert hub.sent == []
    train, test = (f"data/{part}-00000-of-00001.parquet" for part in ("train", "test"))
    hub.broken_after[train] = 100
    result = run_command(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"downloading {NAME} from {hub.url}" in result.stderr
    assert sorted(hub.sent) == [test, train, train]  # the first transfer broke off
    run = tmp_path / "outputs" / "rl"
    config = read_config(run)
    assert {source["taskset"]["revision"] for source in (*config["train"], *config["eval"])} == {first}
    assert len(read_values(run, "reward/all/mean")) == 1
    check_later_starts(hub, tmp_path, command, "--train.0.taskset.revision", monkeypatch)


@pytest.mark.full("twenty seconds; tests/launch/test_pinned_datasets.py tests the same in one process")
def test_sft_by_name(hub, tmp_path, monkeypatch):
    first = hub.repos["datasets", NAME].refs["main"]
    command = ["sft", "@", "sft.toml", "-m", "tiny"]
    result = run_command(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"downloading {NAME} from {hub.url}" in result.stderr
    assert sorted(hub.sent) == [f"data/{part}-00000-of-00001.parquet" for part in ("dev", "train")]
    config = read_config(tmp_path / "outputs" / "sft")
    assert config["data"]["revision"] == config["validation"]["revision"] == first
    check_later_starts(hub, tmp_path, command, "--data.revision", monkeypatch)
