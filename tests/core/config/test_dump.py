"""The resolved configuration as a file has every key, and reads back as an equal configuration."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.core.config import Config, dry_run, dump_toml, parse, write_toml
from ramify.core.errors import ConfigInvalid, StorageFailed
from tests.support.example_config import Elastic, Optim, Run, Sampling, Source, Static, Trainer, Wandb

text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
integer = st.integers(-(2**62), 2**62)
number = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.booleans() | integer | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def optional(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | inner


pools = st.builds(Elastic, min=integer, max=optional(integer)) | st.builds(
    Static, workers=integer, cores=st.lists(integer, max_size=3)
)
sources = st.builds(
    Source,
    name=optional(text),
    taskset=st.dictionaries(text, plain, max_size=3),
    sampling=st.builds(Sampling, temperature=number, max_tokens=optional(integer)),
    pool=pools,
    tags=st.lists(text, max_size=3),
    shuffle=st.booleans(),
)
runs = st.builds(
    Run,
    name=text,
    max_steps=integer,
    output=st.builds(Path, st.from_regex(r"[a-z/.]{1,10}", fullmatch=True)),
    memory=number | st.just("auto"),
    trainer=st.builds(
        Trainer,
        optim=st.builds(Optim, lr=number, warmup_steps=integer, betas=st.lists(number, max_size=3)),
        compile=st.booleans(),
    ),
    pool=pools,
    wandb=optional(st.builds(Wandb, project=text, entity=optional(text))),
    train=st.lists(sources, max_size=3),
    eval=st.lists(sources, max_size=3),
)


@settings(max_examples=settings().max_examples // 2)  # large ones
@given(config=runs)
def test_the_written_config_reads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / f"run-{os.getpid()}.toml"
    write_toml(config, path)
    parsed = parse(Run, ["@", str(path)])
    assert parsed == config
    assert dump_toml(parsed) == dump_toml(config)


def test_the_written_config_has_every_key():
    written = dump_toml(Run(name="x"))
    assert "max_steps = 120" in written
    assert "[trainer.optim]" in written
    assert 'wandb = "None"' in written


def test_none_in_a_plugin_table_is_refused_with_its_key():
    with pytest.raises(ConfigInvalid, match=r"train\.0\.taskset\.split: None"):
        dump_toml(Run(name="x", train=[Source(taskset={"split": None})]))
    with pytest.raises(ConfigInvalid, match=r"train\.0\.taskset\.seeds\.1: None"):
        dump_toml(Run(name="x", train=[Source(taskset={"seeds": [1, None]})]))


def test_writing_creates_the_directory_and_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "outputs" / "x" / "config.toml"
    write_toml(Run(name="x"), path)
    write_toml(Run(name="y"), path)
    assert list(path.parent.iterdir()) == [path]
    assert parse(Run, ["@", str(path)]).name == "y"


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "config.toml"
    write_toml(Run(name="x"), path)
    with pytest.raises(ConfigInvalid):
        write_toml(Run(name="y", train=[Source(taskset={"split": None})]), path)
    assert list(tmp_path.iterdir()) == [path]
    assert parse(Run, ["@", str(path)]).name == "x"


def test_a_dry_run_writes_the_config_and_prints_the_plan(tmp_path, capsys):
    class Command(Config):
        steps: int = 3

    config = parse(Command, ["--steps", "4"])
    dry_run(config, tmp_path / "out", ["trainer: 1 process", "engine: 1 process"])
    assert parse(Command, ["@", str(tmp_path / "out" / "config.toml")]) == config
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["trainer: 1 process", "engine: 1 process"]
    assert str(tmp_path / "out" / "config.toml") in lines[-1]


def test_a_dry_run_replaces_files_of_a_dry_run_but_not_of_a_run(tmp_path, capsys):
    dry_run(Run(name="x"), tmp_path, [])
    (tmp_path / "plan.txt").touch()
    dry_run(Run(name="y"), tmp_path, [])
    assert parse(Run, ["@", str(tmp_path / "config.toml")]).name == "y"
    (tmp_path / "logs").mkdir()
    dry_run(Run(name="z"), tmp_path, ["a plan"], write_files=lambda: pytest.fail("its processes may read those files"))
    assert parse(Run, ["@", str(tmp_path / "config.toml")]).name == "y"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "a plan",
        f"dry run: nothing was started; {tmp_path} holds a run and is unchanged",
    ]


def test_a_dry_run_in_an_unwritable_directory_raises_storage_failed(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match="Not a directory"):
        dry_run(Run(name="x"), tmp_path / "file" / "x", [])
