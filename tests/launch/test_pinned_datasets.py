"""A run reads one commit of each dataset, which it keeps when it is resumed."""

import json

import pytest

from ramify.cli import main
from ramify.core.config import CONFIG_FILE, write_toml
from ramify.core.errors import ConfigInvalid
from ramify.launch.pinned_datasets import pin_datasets
from ramify.orchestrate.run_config import RunConfig
from tests.support.hub import serve_hub

NAME = "org/words"


def make_rows(word: str) -> bytes:
    rows = [{"prompt": f"{word} {number}", "answer": "1"} for number in range(4)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def make_files(word: str) -> dict[str, bytes]:
    return {f"{part}.jsonl": make_rows(f"{word} {part}") for part in ("train", "test", "other")}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serve_hub() as server:
        server.add("datasets", NAME, make_files("old"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server


def make_config(**keys: str) -> RunConfig:
    def source(part: str, split: str) -> dict:
        taskset = {"id": "dataset", "path": NAME, "part": part, "split": split, "eval_share": float(split == "eval")}
        return {"taskset": {**taskset, **keys}}

    return RunConfig(train=[source("train", "train")], eval=[source("test", "eval")])


def pin(config: RunConfig, *, fresh: bool = False, accept: bool = False, download: bool = True) -> RunConfig:
    log = (lambda line: None) if download else None
    return pin_datasets(config, fresh=fresh, accept_changes=accept, log=log)


def test_sources_of_a_run_read_one_commit_under_the_same_name_of_the_run(hub):
    config = make_config()
    first = hub.repos["datasets", NAME].refs["main"]
    assert pin(config, download=False) == config.model_copy(update={"name": config.path.name})
    pinned = pin(config)
    assert [source.taskset["revision"] for source in (*pinned.train, *pinned.eval)] == [first, first]
    assert pinned.path == config.path
    assert sorted(hub.sent) == ["test.jsonl", "train.jsonl"]
    assert pinned.identity["train"]["dataset"]["taskset"]["revision"] == first


def test_resumed_run_keeps_its_commit_and_refuses_another_revision(hub, tmp_path, monkeypatch):
    first = hub.repos["datasets", NAME].refs["main"]
    pinned = pin(make_config())
    write_toml(pinned, pinned.path / CONFIG_FILE)
    second = hub.repos["datasets", NAME].commit(make_files("new"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert pin(make_config()) == pin(make_config(), download=False) == pinned
    message = rf"train\.0\.taskset\.revision: {NAME} at 'main' is now {second[:12]}, but this run has read {first[:12]}"
    resumed = make_config(revision="main").model_copy(update={"name": pinned.path.name})
    with pytest.raises(ConfigInvalid, match=message):
        pin(resumed)
    for accepted in (pin(resumed, accept=True), pin(resumed, fresh=True)):
        assert {source.taskset["revision"] for source in (*accepted.train, *accepted.eval)} == {second}


def test_a_source_that_is_added_before_the_others_reads_their_commit(hub):
    pinned = pin(make_config())
    write_toml(pinned, pinned.path / CONFIG_FILE)
    hub.repos["datasets", NAME].commit(make_files("new"))
    (old,) = make_config().train
    added = old.model_copy(update={"name": "added", "taskset": {**old.taskset, "part": "other"}})
    config = make_config().model_copy(update={"train": [added, old], "name": pinned.path.name})
    (revision,) = {source.taskset["revision"] for source in (*pinned.train, *pinned.eval)}
    assert {source.taskset["revision"] for source in pin(config).train} == {revision}


@pytest.mark.parametrize("revisions", [("main", "main"), (None, "main"), ("main", None)])
def test_sources_read_one_commit_though_the_branch_moves_between_them(hub, revisions):
    first = hub.repos["datasets", NAME].refs["main"]
    config = make_config()
    for source, revision in zip((*config.train, *config.eval), revisions, strict=True):
        source.taskset.update({} if revision is None else {"revision": revision})

    def move_branch(line: str) -> None:
        if line.startswith("downloaded"):
            hub.repos["datasets", NAME].commit(make_files("new"))

    pinned = pin_datasets(config, fresh=False, accept_changes=False, log=move_branch)
    assert [source.taskset["revision"] for source in (*pinned.train, *pinned.eval)] == [first, first]


@pytest.mark.process
@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_downloads_nothing_and_names_what_the_run_will_download(hub, tmp_path, capsys):
    write_toml(make_config(), tmp_path / "run.toml")
    assert main(["rl", "@", "run.toml", "-m", "tiny", "--dry-run"]) == 0
    note = f"the run downloads {NAME} when it starts; to do it now: 'ramify data {NAME}'"
    lines = capsys.readouterr().out.splitlines()
    assert [f"note: {kind}.0.taskset.path: {note}" for kind in ("train", "eval")] == [
        line for line in lines if NAME in line
    ]
    assert hub.sent == []


def test_eval_pins_its_dataset_under_the_same_name(hub):
    from ramify.rollout.evals.config import EvalConfig
    from ramify.rollout.evals.run import get_run_path, pin_eval_dataset, with_eval_split

    config = EvalConfig(taskset={"id": "dataset", "path": NAME, "part": "test", "eval_share": 1.0})
    first = hub.repos["datasets", NAME].refs["main"]
    pinned = pin_eval_dataset(config, fresh=False, accept_changes=False, log=lambda line: None)
    assert pinned.taskset["revision"] == first
    path = get_run_path(with_eval_split(pinned))
    assert path == get_run_path(with_eval_split(config))
    write_toml(pinned, path / CONFIG_FILE)
    hub.repos["datasets", NAME].commit(make_files("new"))
    assert pin_eval_dataset(config, fresh=False, accept_changes=False, log=None) == pinned
