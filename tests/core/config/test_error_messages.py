"""One error lists every problem with its key, what was expected, and a suggestion."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from ramify.core.config import Config, parse
from ramify.core.errors import ConfigInvalid
from tests.support.example_config import Run


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def get_error(args: list[str], cls: type[Config] = Run) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        parse(cls, args)
    return str(caught.value)


def get_problem(args: list[str], cls: type[Config] = Run) -> str:
    """Return the only problem of an error."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(cls, args)
    (problem,) = caught.value.problems
    assert str(caught.value) == str(problem)
    return str(problem)


# -- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "key", "suggestion"),
    [
        (["--max-step", "3"], "max_step", "max_steps"),
        (["--trainer.optim.warmup", "3"], "trainer.optim.warmup", "trainer.optim.warmup_steps"),
        (["--trainer.optm.lr", "3"], "trainer.optm", "trainer.optim"),
        (["--wandb.projct", "p"], "wandb.projct", "wandb.project"),
        (["--pool.wrkers", "3", "--pool.type", "static"], "pool.wrkers", "pool.workers"),
        (["--pool.mn=3"], "pool.mn", "pool.min"),
        (["--eval.0.sampling.temprature", "3"], "eval.0.sampling.temprature", "eval.0.sampling.temperature"),
        (["--eval.0.pool.mi", "3"], "eval.0.pool.mi", "eval.0.pool.min"),
        (["--lr", "3"], "lr", "trainer.optim.lr"),
        (["--temperature", "3"], "temperature", "train.0.sampling.temperature"),
    ],
)
def test_an_unknown_flag_is_reported_with_a_suggestion(flags, key, suggestion):
    line = get_problem(["--name", "x", *flags])
    assert line == f"{key}: unknown flag {flags[0].split('=')[0]}; did you mean --{suggestion}?"


@pytest.mark.parametrize(
    ("text", "key", "suggestion"),
    [
        ("max_step = 3", "max_step", "max_steps"),
        ("[trainer.optim]\nwarmup_step = 3", "trainer.optim.warmup_step", "trainer.optim.warmup_steps"),
        ("[[train]]\n[[train]]\nsamplin = {}", "train.1.samplin", "train.1.sampling"),
        ("[[train]]\npool = { type = 'static', worker = 2 }", "train.0.pool.worker", "train.0.pool.workers"),
        ("[[train]]\npool = { minn = 2 }", "train.0.pool.minn", "train.0.pool.min"),
        ("[pool]\ntype = 'static'\nstatc = 1", "pool.statc", None),
    ],
)
def test_an_unknown_key_in_a_file_is_reported_with_a_suggestion_and_the_file(file, text, key, suggestion):
    path = file(f"name = 'x'\n{text}\n")
    line = get_problem(["@", path])
    assert line.startswith(f"{key}: unknown key")
    assert suggestion is None or f"did you mean {suggestion}?" in line
    assert path in line


def test_a_key_of_the_top_level_inside_a_section_is_reported_with_the_keys_of_the_section(file):
    line = get_problem(["@", file("name = 'x'\n[wandb]\nmax_steps = 3\n")])
    assert line.startswith(
        "wandb.max_steps: unknown key; max_steps is a key of the top level; valid here: project, entity"
    )


def test_a_key_without_a_similar_one_is_reported_with_the_valid_keys():
    line = get_problem(["--name", "x", "--wandb.zzz", "1"])
    assert "valid here: project, entity" in line


def test_a_key_of_another_variant_is_reported_as_unknown(file):
    line = get_problem(["@", file("name = 'x'\n[pool]\nmin = 2\n"), "--pool.type", "static"])
    assert line.startswith("pool.min: unknown key; pool with type = 'static' has type, workers, cores")


def test_the_error_names_the_file_that_set_the_key(file):
    good, bad = file("name = 'x'\nmax_steps = 3\n", "good.toml"), file("max_steps = 'many'\n", "bad.toml")
    line = get_problem(["@", good, "@", bad])
    assert bad in line
    assert good not in line


# -- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-steps", "many"], ["max_steps", "integer", "'many'"]),
        (["--trainer.compile", "perhaps"], ["trainer.compile", "boolean", "'perhaps'"]),
        (["--eval.0.sampling.temperature", "hot"], ["eval.0.sampling.temperature", "number", "'hot'"]),
        (["--pool.type", "statc"], ["pool.type", "'elastic'", "'static'", "'statc'"]),
        (["--memory", "lots"], ["memory", "number", "'auto'", "'lots'"]),
        (["--trainer.optim.betas", "a", "b"], ["trainer.optim.betas.0", "number", "'a'"]),
        (["--trainer.optim.window", "0.5"], ["trainer.optim.window.1", "required"]),
        (["--trainer.optim.lr", "inf"], ["trainer.optim.lr", "finite", "'inf'"]),
        (["--trainer", "big"], ["trainer", "expected a table", "'big'"]),
        (["--train", "[{"], ["train", "[{"]),
    ],
)
def test_a_wrong_value_is_reported_with_what_was_expected(flags, words):
    text = get_error(["--name", "x", *flags])
    for word in words:
        assert word in text


def test_a_missing_key_is_reported():
    assert get_problem([]) == "name: required, but not given"


def test_every_problem_is_listed_once(file):
    text = get_error(
        ["@", file("max_step = 3\n[[train]]\nshuffle = 7\n"), "--trainer.optim.lr", "fast", "--eval.3.x=1"]
    )
    assert text.splitlines()[0].startswith("5 problems")
    for key in ("max_step:", "train.0.shuffle:", "trainer.optim.lr:", "eval.3:", "name:"):
        assert text.count(f"  {key}") == 1


def test_errors_of_model_validators_are_reported_like_others():
    class Window(Config):
        low: int = 0
        high: int = 1

        @model_validator(mode="after")
        def ordered(self) -> "Window":
            if self.low > self.high:
                raise ValueError(f"low ({self.low}) is above high ({self.high})")
            return self

    class Outer(Config):
        window: Window = Window()

    assert get_problem(["--window.low", "5"], Outer).startswith("window: low (5) is above high (1)")
    assert get_problem(["--low", "5"], Window) == "low (5) is above high (1) (--low)"
    assert (
        get_problem(["--low", "5", "--high", "2"], Window) == "low (5) is above high (2)"
    )  # two origins: neither is named


def test_two_rules_that_one_value_breaks_are_joined_with_a_semicolon():
    class Window(Config):
        low: int = 0
        high: int = 9

        def find_problems(self):
            return ("low", "5 is odd"), ("low", "expected below 3, got 5"), ("high", "9 is odd")

    assert get_error(["--low", "5"], Window).splitlines() == [
        "2 problems in the configuration:",
        "  low: 5 is odd; expected below 3, got 5 (--low)",
        "  high: 9 is odd",
    ]


# -- malformed flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--max-steps"], "max_steps: needs a value"),
        (["--max-steps", "1", "2"], "max_steps: takes one value"),
        (["--trainer.optim.betas"], "trainer.optim.betas: needs a value"),
        (["stray"], "'stray'"),
        (["-x"], "unknown flag -x; --help lists the flags"),
        (["--"], "'--'"),
        (["--name.first", "x"], "name.first: name is a value, not a section"),
        (["--eval.1.tags=a"], "eval.1: eval has 1 entry (0)"),
        (["--train.0.tags=a"], "train.0: train has no entries"),
        (["--eval.first.tags=a"], "eval.first: entries of eval are numbered"),
        (["@"], "@ needs a file"),
        (["--trainer", "@"], "@ needs a file"),
    ],
)
def test_a_malformed_flag_is_reported_with_the_reason(flags, problem):
    assert problem in get_problem(["--name", "x", *flags])


# -- unreadable files -------------------------------------------------------------------------------------------------


def test_a_missing_file_is_reported():
    assert "nowhere.toml" in get_problem(["@", "nowhere.toml"])


def test_invalid_toml_is_reported_with_its_line(file):
    path = file("name = 'x'\nmax_steps = \n")
    line = get_problem(["@", path])
    assert path in line
    assert "line 2" in line


def test_a_file_that_is_not_text_is_reported(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"name = '\xff'\n")
    assert str(path) in get_problem(["@", str(path)])


def test_a_directory_is_reported(tmp_path):
    assert str(tmp_path) in get_problem(["@", str(tmp_path)])


def test_all_bad_files_are_reported_together(file):
    bad = file("= 3\n")
    text = get_error(["@", bad, "@", "nowhere.toml"])
    assert bad in text
    assert "nowhere.toml" in text


# -- arbitrary arguments ----------------------------------------------------------------------------------------------

anything = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)  # what argv can hold
known = [
    "name",
    "train",
    "eval",
    "0",
    "1",
    "pool",
    "type",
    "trainer",
    "optim",
    "betas",
    "taskset",
    "wandb",
    "max-steps",
]
paths = st.lists(st.sampled_from(known) | anything, max_size=4).map(".".join)
words = st.sampled_from(["static", "None", "true", "[1]", "{}", '{"a": [null]}', "-1", "@", "x=y"]) | anything
flags = st.builds("--{}{}".format, st.sampled_from(["", "no-"]), paths)
tokens = st.one_of(words, flags, st.builds("{}={}".format, flags, words))


@given(st.lists(tokens, max_size=8))
def test_any_command_line_parses_or_raises_config_invalid(args):
    try:
        config = parse(Run, ["--name", "x", *args])
    except ConfigInvalid as error:
        assert all(str(problem) in str(error) for problem in error.problems)
    except SystemExit as stop:
        assert stop.code == 0
        assert {"--help", "-h"} & set(args)
    else:
        assert isinstance(config, Run)
