"""Datasets by name: files of a subset and part are downloaded from a hub, from a fixed commit, and read offline."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ramify.core.errors import ConfigInvalid
from ramify.core.hub import HubRepo
from ramify.env.data_config import DataFilesConfig
from ramify.env.data_rows import read_rows
from ramify.env.data_selection import fetch_dataset, find_cached_commit, pin_dataset
from tests.support.hub import serve_hub

NAME = "org/sums"
CHUNK = 10 * 1024**2  # `huggingface_hub` writes so many bytes at a time
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: hard
  data_files:
  - split: test
    path: [hard/*.parquet]
---
"""


def make_parquet(directory: Path, word: str, num_rows: int = 3) -> bytes:
    table = pyarrow.Table.from_pylist([{"question": f"{word} {n}", "answer": str(n)} for n in range(num_rows)])
    pyarrow.parquet.write_table(table, directory / "rows.parquet")
    return (directory / "rows.parquet").read_bytes()


def make_jsonl(word: str) -> bytes:
    return b"".join(json.dumps({"question": f"{word} {n}"}).encode() + b"\n" for n in range(2))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a dataset of two subsets and three splits, and an empty cache."""
    files = {
        f"{subset}/{part}-0000{shard}-of-00002.parquet": make_parquet(tmp_path, f"{subset} {part} {shard}")
        for subset, part in (("main", "train"), ("main", "test"), ("hard", "test"))
        for shard in range(2)
    }
    with serve_hub() as server:
        server.add("datasets", NAME, {**files, "README.md": CARD, "picture.png": b"png"})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server


def fetch(**keys: str) -> str | None:
    return fetch_dataset(DataFilesConfig(path=NAME, **keys), lambda line: None)


def read_questions(path: str = NAME, **keys: str) -> list[str]:
    return [row["question"] for row in read_rows(DataFilesConfig(path=path, **keys))]


def test_only_the_files_of_the_subset_and_part_are_downloaded(hub):
    with pytest.raises(ConfigInvalid, match=r"not in the local cache; 'ramify data org/sums' downloads"):
        read_questions(subset="main", part="train")
    commit = fetch(subset="main", part="train")
    assert commit == hub.repos["datasets", NAME].refs["main"]
    assert set(hub.sent) == {"README.md", *(f"main/train-0000{shard}-of-00002.parquet" for shard in range(2))}
    assert read_questions(subset="main", part="train") == [f"main train {s} {n}" for s in range(2) for n in range(3)]
    with pytest.raises(ConfigInvalid, match="downloaded in part"):
        read_questions(subset="main", part="test")
    assert fetch(subset="main", part="test") == commit
    assert len(read_questions(subset="main", part="test")) == 6


def test_missing_subset_and_part_are_reported_with_those_that_exist(hub):
    with pytest.raises(ConfigInvalid, match="has the subsets main, hard; set `subset`"):
        fetch(part="test")
    with pytest.raises(ConfigInvalid, match="no subset 'easy'; it has main, hard"):
        fetch(subset="easy")
    with pytest.raises(ConfigInvalid, match="no part 'dev'; it has test, train"):
        fetch(subset="main", part="dev")


def test_without_card_the_names_of_files_and_directories_tell_subset_and_part(hub):
    hub.add("datasets", "org/plain", {f"{word}/test.jsonl": make_jsonl(word) for word in ("easy", "hard")})
    fetch_dataset(DataFilesConfig(path="org/plain", subset="easy"), lambda line: None)
    assert read_questions("org/plain", subset="easy", part="test") == ["easy 0", "easy 1"]
    assert hub.sent == ["easy/test.jsonl"]


def test_card_of_a_local_directory_counts(hub, tmp_path):
    for name, data in hub.repos["datasets", NAME].commits[hub.repos["datasets", NAME].refs["main"]].items():
        (tmp_path / "sums" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / name).write_bytes(data)
    assert len(read_questions(str(tmp_path / "sums"), subset="hard")) == 6
    with pytest.raises(ConfigInvalid, match="set `subset`"):
        read_questions(str(tmp_path / "sums"))


@pytest.mark.parametrize(
    "configs", ["- data_files: a.jsonl", "- config_name: a\n  data_files: {train: a.jsonl}", "a", "[a"]
)
def test_a_card_that_cannot_be_read_is_named(tmp_path, configs):
    (tmp_path / "a.jsonl").write_bytes(make_jsonl("a"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    with pytest.raises(ConfigInvalid, match=r"README.md: `configs` cannot be read .* correct it, or remove README.md"):
        read_questions(str(tmp_path))


def test_broken_transfer_is_resumed_and_finished_files_are_not_repeated(hub):
    row = json.dumps({"question": "a" * 2 * CHUNK}).encode()
    hub.add("datasets", "org/long", {"train-0.jsonl": row, "train-1.jsonl": make_jsonl("short")})
    hub.broken_after["train-0.jsonl"] = CHUNK + 100
    config = DataFilesConfig(path="org/long")
    fetch_dataset(config, lambda line: None)
    assert f"train-0.jsonl from {CHUNK}" in hub.sent
    assert read_questions("org/long") == ["a" * 2 * CHUNK, "short 0", "short 1"]

    file = HubRepo("dataset", "org/long").find_snapshot() / "train-1.jsonl"
    file.resolve().unlink()  # as if the process had been killed before
    file.unlink()
    hub.sent.clear()
    fetch_dataset(config, lambda line: None)
    assert hub.sent == ["train-1.jsonl"]


def test_branches_tags_and_commits_are_resolved(hub):
    repo = hub.repos["datasets", NAME]
    first = repo.refs["v1"] = repo.refs["main"]
    second = repo.commit({"train.jsonl": make_jsonl("new")})
    assert fetch(revision="v1", subset="main") == first
    assert fetch() == second
    assert fetch(revision=first, subset="main") == first
    assert read_questions() == ["new 0", "new 1"]
    assert read_questions(revision="v1", subset="main")[0] == "main test 0 0"
    with pytest.raises(ConfigInvalid, match=r"'org/sums' has no such revision on http.*branch, tag or commit"):
        fetch(revision="v7")


def test_files_are_downloaded_at_the_commit_at_which_they_were_chosen(hub):
    first = hub.repos["datasets", NAME].refs["main"]

    config = DataFilesConfig(path=NAME, subset="main", part="train")

    def move_branch(line: str) -> None:
        if line.startswith("downloading"):
            hub.repos["datasets", NAME].commit({"renamed.jsonl": make_jsonl("new")})

    assert fetch_dataset(config, move_branch) == first
    assert find_cached_commit(config) == first


def test_cached_dataset_needs_no_network_and_the_error_without_one_says_what_to_bring(hub, monkeypatch):
    commit = fetch(subset="main")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(subset="main") == commit
    with pytest.raises(ConfigInvalid) as error:
        fetch_dataset(DataFilesConfig(path="org/other", revision="v1"), lambda line: None)
    assert "\n" not in str(error.value)
    command = "hf download --repo-type dataset org/other --revision v1 --local-dir other"
    assert command in str(error.value)
    assert "set path = 'other'" in str(error.value)


def test_a_run_continues_with_its_commit_unless_another_revision_is_named(hub, tmp_path, monkeypatch):
    repo = hub.repos["datasets", NAME]
    first = repo.refs["main"]
    config = DataFilesConfig(path=NAME, subset="main", part="test")

    def pin(previous: DataFilesConfig | None, *, download: bool = True, **keys: str) -> str | None:
        log = (lambda line: None) if download else None
        return pin_dataset(config.model_copy(update=keys), previous, key="data", log=log)

    assert pin(None, download=False) is None
    assert hub.sent == []
    assert pin(None) == first
    pinned = config.model_copy(update={"revision": first})
    second = repo.commit({"README.md": CARD, "main/test-00000-of-00001.parquet": make_parquet(tmp_path, "new")})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache of another machine"))
    assert pin(pinned, download=False) == pin(pinned) == pin(pinned, download=False) == first
    assert pin(pinned, revision=first) == first
    with pytest.raises(
        ConfigInvalid, match=f"data.revision: org/sums at 'main' is now {second[:12]}, .* has read {first[:12]}"
    ):
        pin(pinned, revision="main")


def test_revision_of_a_path_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_jsonl("a"))
    with pytest.raises(ConfigInvalid, match="revision is for datasets of the hub"):
        read_questions(str(tmp_path / "rows.jsonl"), revision="v1")
