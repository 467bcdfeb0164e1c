"""Precedence: defaults, then files from left to right, then flags; a flag can set every key that a file can."""

import tomllib
from pathlib import Path

import pytest

from ramify.core.config import Config, dump_toml, parse
from ramify.core.errors import ConfigInvalid
from tests.support.example_config import Elastic, Run, Sampling, Source, Static, Switched, Wandb

RUN = """
name = "reverse-text"
max_steps = 10

[trainer.optim]
warmup_steps = 20

[[train]]
name = "reverse"
taskset = { id = "reverse-text", max_chars = 8 }
sampling = { temperature = 0.9 }
pool = { type = "static", workers = 2 }

[[train]]
name = "sort"
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    return toml(tmp_path / "run.toml", RUN)


def toml(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# -- layers -----------------------------------------------------------------------------------------------------------


def test_defaults_apply_without_input():
    assert parse(Run, ["--name", "x"]) == Run(name="x")


def test_a_file_overrides_defaults(run):
    config = parse(Run, ["@", run])
    assert (config.name, config.max_steps, config.trainer.optim.warmup_steps) == ("reverse-text", 10, 20)
    assert config.train[0].pool == Static(workers=2)
    assert config.train[0].sampling == Sampling(temperature=0.9)
    assert config.train[1] == Source(name="sort")


def test_later_files_are_merged_over_earlier_ones_key_by_key(run, tmp_path):
    more = toml(tmp_path / "more.toml", "max_steps = 11\n[trainer.optim]\nlr = 0.5\n")
    config = parse(Run, ["@", run, "@", more])
    assert (config.name, config.max_steps) == ("reverse-text", 11)
    assert (config.trainer.optim.lr, config.trainer.optim.warmup_steps) == (0.5, 20)
    assert parse(Run, ["@", more, "@", run]).max_steps == 10


def test_flags_override_files_in_any_order(run):
    assert parse(Run, ["--max-steps", "7", "@", run]).max_steps == 7
    assert parse(Run, ["@", run, "--max-steps", "7"]).max_steps == 7


@pytest.mark.parametrize("sign", [["@", "{}"], ["@{}"]])
def test_a_section_can_have_its_own_file(run, tmp_path, sign):
    optim = toml(tmp_path / "optim.toml", "lr = 0.25\n")
    config = parse(Run, ["@", run, "--trainer.optim", *(part.format(optim) for part in sign)])
    assert (config.trainer.optim.lr, config.trainer.optim.warmup_steps) == (0.25, 20)


def test_a_list_entry_can_have_its_own_file(run, tmp_path):
    entry = toml(tmp_path / "entry.toml", "sampling = { max_tokens = 64 }\n")
    config = parse(Run, ["@", run, "--train.0", "@", entry])
    assert config.train[0].sampling == Sampling(temperature=0.9, max_tokens=64)


def test_a_switch_before_a_file_takes_no_value(run):
    config = parse(Run, ["--trainer.compile", "@", run])
    assert (config.trainer.compile, config.name) == (True, "reverse-text")


def test_an_explicit_default_of_a_section_survives_other_keys(run):
    assert Run(name="x").trainer.optim.lr == 3e-4
    assert parse(Run, ["@", run]).trainer.optim.lr == 3e-4
    assert parse(Run, ["--name", "x", "--trainer.optim.warmup-steps", "3"]).trainer.optim.lr == 3e-4


@pytest.mark.parametrize(
    ("args", "enabled"),
    [
        ([], False),
        (["--adapters.rank", "16"], True),  # the default value, but the section is set
        (["--adapters"], True),
        (["--adapters", "{}"], True),
        (["--adapters.enabled", "false", "--adapters.rank", "8"], False),
        (["--adapters.rank", "8", "--no-adapters.enabled"], False),
    ],
)
def test_a_section_with_a_switch_is_on_when_it_is_set(args, enabled):
    config = parse(Switched, args)
    assert config.adapters.enabled is enabled
    for stored in (config.model_dump(exclude_unset=True), tomllib.loads(dump_toml(config))):
        assert Switched.model_validate(stored).adapters == config.adapters


def test_a_table_without_a_type_is_the_default_variant():
    assert parse(Run, ["--name", "x", "--pool.min", "2"]).pool == Elastic(min=2)


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--max-steps", "7"], "max_steps", 7),
        (["--max-steps=7"], "max_steps", 7),
        (["--max_steps", "7"], "max_steps", 7),
        (["--max-steps", "7", "--max-steps", "8"], "max_steps", 8),
        (["--name=--odd"], "name", "--odd"),
        (["--name=a=b"], "name", "a=b"),
        (["--name", "7"], "name", "7"),
        (["--name=@home"], "name", "@home"),
        (["--memory", "0.5"], "memory", 0.5),
        (["--memory", "auto"], "memory", "auto"),
        (["--output", "some/where"], "output", Path("some/where")),
        (["--trainer.optim.lr", "-1e-3"], "trainer.optim.lr", -1e-3),
        (["--trainer.optim.lr=1"], "trainer.optim.lr", 1.0),
        (["--trainer.compile"], "trainer.compile", True),
        (["--trainer.compile", "false"], "trainer.compile", False),
        (["--trainer.compile=true"], "trainer.compile", True),
        (["--no-trainer.compile"], "trainer.compile", False),
        (["--trainer.optim.betas", "0.8", "0.9"], "trainer.optim.betas", [0.8, 0.9]),
        (["--trainer.optim.betas=0.8"], "trainer.optim.betas", [0.8]),
        (["--trainer.optim.betas", "[0.8, 0.9]"], "trainer.optim.betas", [0.8, 0.9]),
        (["--trainer.optim.betas", "[]"], "trainer.optim.betas", []),
        (["--trainer.optim.betas.1", "0.99"], "trainer.optim.betas", [0.9, 0.99]),
        (["--trainer.optim.window", "0.8", "0.9"], "trainer.optim.window", (0.8, 0.9)),
        (["--trainer.optim.window", "[0.8, 0.9]"], "trainer.optim.window", (0.8, 0.9)),
        (["--trainer.optim.window.1", "0.9"], "trainer.optim.window", (0.0, 0.9)),
        (["--trainer.optim.marks", "a", "7", "c"], "trainer.optim.marks", ("a", "7", "c")),
        (["--pool.type", "static"], "pool", Static()),
        (["--pool.workers", "3", "--pool.type", "static"], "pool", Static(workers=3)),
        (["--pool.type=static", "--pool.cores", "0", "1"], "pool", Static(cores=[0, 1])),
        (["--pool", '{"type": "static", "workers": 9}'], "pool", Static(workers=9)),
        (["--wandb"], "wandb", Wandb()),
        (["--wandb.project=p"], "wandb", Wandb(project="p")),
        (["--wandb", "None"], "wandb", None),
        (["--wandb.project=p", "--no-wandb"], "wandb", None),
        (["--train", '[{"name": "a"}]'], "train", [Source(name="a")]),
        (["--eval.0.shuffle", "false"], "eval", [Source(name="held-out", shuffle=False)]),
    ],
)
def test_a_flag_sets_its_key(flags, key, value):
    parsed = parse(Run, ["--name", "x", *flags])
    for part in key.split("."):
        parsed = getattr(parsed, part)
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_list_entry_is_overridden_by_index_and_keeps_other_keys(run):
    config = parse(
        Run, ["@", run, "--train.0.sampling.temperature", "0.7", "--train.1.tags=a", "--train.0.tags", "b", "c"]
    )
    assert config.train[0].sampling == Sampling(temperature=0.7)
    assert config.train[0].name == "reverse"
    assert [source.tags for source in config.train] == [["b", "c"], ["a"]]


def test_values_in_plugin_tables_are_parsed_as_json_or_else_text(run):
    flags = ["--train.0.taskset.max_chars", "9", "--train.0.taskset.split", "eval", "--train.0.taskset.deep.x=[1]"]
    taskset = parse(Run, ["@", run, *flags]).train[0].taskset
    assert taskset == {"id": "reverse-text", "max_chars": 9, "split": "eval", "deep": {"x": [1]}}


def test_text_in_a_file_is_not_parsed(tmp_path):
    file = toml(tmp_path / "run.toml", 'name = "None of it"\n[[train]]\ntaskset = { id = "a", port = "8000" }\n')
    config = parse(Run, ["@", file])
    assert config.name == "None of it"
    assert config.train[0].taskset == {"id": "a", "port": "8000"}


def test_none_can_be_written_in_a_file(tmp_path):
    file = toml(tmp_path / "run.toml", 'name = "x"\n[[train]]\nsampling = { max_tokens = "None" }\n')
    assert parse(Run, ["@", file]).train[0].sampling.max_tokens is None


def test_none_is_text_where_none_is_not_allowed():
    assert parse(Run, ["--name", "None"]).name == "None"


def test_parsing_does_not_change_the_defaults_of_the_class():
    parse(Run, ["--name", "x", "--eval.0.tags", "a", "--trainer.optim.betas.0", "0.1"])
    assert Run(name="x").eval[0].tags == []
    assert Run(name="x").trainer.optim.betas == [0.9, 0.95]


# -- help and import --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "shown", "hidden"),
    [
        (
            ["--max-steps", "3", "--help"],
            ["ramify rl --help SECTION", "--max_steps INT", "  trainer"],
            ["--trainer.optim.lr"],
        ),
        (["-h"], ["(required)"], []),
        (
            ["--help", "trainer"],
            ["--trainer.optim.lr NUMBER            (0.0003)", "--trainer.compile"],
            ["--max_steps"],
        ),
        (["--help", "train"], ["--train.0.sampling.temperature"], ["--eval.0"]),
        (["--help", "pool"], ["pool with type = 'elastic':", "pool with type = 'static':"], []),
        (["--help", "all"], ["--trainer.optim.warmup_steps", "--eval.0.sampling.temperature"], []),
    ],
)
def test_help_prints_the_sections_or_the_keys_of_one_and_exits_zero(args, shown, hidden, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Run, args, prog="ramify rl")
    assert stop.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(text.split()) in output for text in shown)
    assert not any(text in output for text in hidden)


def test_help_for_an_unknown_section_suggests_another():
    with pytest.raises(ConfigInvalid, match="there is no key 'trainr'; did you mean 'trainer'"):
        parse(Run, ["--help", "trainr"])


def test_a_config_refuses_unknown_keys_in_python():
    class Small(Config):
        a: int = 1

    with pytest.raises(ValueError, match="b"):
        Small(b=2)


def test_nul_characters_and_deep_tables_are_named(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"name: a NUL character is not allowed, found 'a\\x00b'"):
        parse(Run, ["@", toml(tmp_path / "nul.toml", 'name = "a\\u0000b"')])
    with pytest.raises(ValueError, match="a NUL character is not allowed"):
        Run.model_validate({"name": "a\0b"})
    with pytest.raises(ConfigInvalid, match=r"'a\\x00b\.toml': cannot be read"):
        parse(Run, ["@", "a\0b.toml"])
    with pytest.raises(ConfigInvalid, match="is nested too deeply"):
        parse(Run, ["@", toml(tmp_path / "deep.toml", "name = " + "[" * 100_000)])
