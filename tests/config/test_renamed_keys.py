"""A key with a new name: the old one is refused with the new one's name, but read from the configuration of a run."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from ramify.config import Config, parse, parse_section, read_stored_config, to_new_keys, to_old_keys
from ramify.errors import ConfigInvalid


class Native(Config):
    renamed_keys: ClassVar = {"memory": "cache_fraction"}

    engine: Literal["native"] = "native"
    cache_fraction: float = 0.4


class Remote(Config):
    renamed_keys: ClassVar = {"memory": "memory_utilization"}

    engine: Literal["remote"] = "remote"
    memory_utilization: float = 0.4


class Source(Config):
    renamed_keys: ClassVar = {"attempts": "max_tries"}

    name: str = ""
    max_tries: int = 3


class EvalSource(Source):
    renamed_keys: ClassVar = {"threshold": "pass_threshold"}

    pass_threshold: float = 1.0


class Launch(Config):
    renamed_keys: ClassVar = {"gpus": "gpu_placement"}
    renamed_values: ClassVar = {"gpu_placement": {"shared": "colocated"}}

    gpu_placement: Literal["split", "colocated"] = "split"


class Run(Config):
    renamed_keys: ClassVar = {"record": "record_batches", "hosts": "allowed_hosts"}

    record_batches: bool = False
    allowed_hosts: list[str] = []
    launch: Launch = Launch()
    inference: Annotated[Native | Remote, Field(discriminator="engine")] = Native()
    eval: list[EvalSource] = []
    harness: dict[str, Any] = {}


OLD_FILE = """
record = true

[launch]
gpus = "shared"

[inference]
engine = "remote"
memory = 0.9

[[eval]]
name = "a"
attempts = 1

[[eval]]
threshold = 0.5
max_tries = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(OLD_FILE, encoding="utf-8")
    return path


def get_problems(*args: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        parse(Run, list(args))
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_every_old_key_of_a_file_is_refused_with_its_new_name(file):
    assert get_problems("@", str(file)) == [
        f"record is now called record_batches ({file})",
        f"launch.gpus is now called gpu_placement, and its value 'shared' is now 'colocated' ({file})",
        f"inference.memory is now called memory_utilization ({file})",
        f"eval.0.attempts is now called max_tries ({file})",
        f"eval.1.threshold is now called pass_threshold ({file})",
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--record"], "record is now called record_batches (--record)"),
        (["--no-record"], "record is now called record_batches (--no-record)"),
        (["--hosts", "a", "b"], "hosts is now called allowed_hosts (--hosts)"),
        (["--inference.memory", "0.3"], "inference.memory is now called cache_fraction (--inference.memory)"),
        (["--launch.gpu-placement", "shared"], "launch.gpu_placement: 'shared' is now 'colocated'"),
    ],
)
def test_an_old_key_or_value_of_a_flag_is_refused_with_its_new_name(flags, problem):
    (line,) = get_problems(*flags)
    assert line.startswith(problem)


def test_old_keys_are_reported_together_with_other_problems():
    old, other = get_problems("--launch.gpus", "split", "--inference.cache_fraction", "x")
    assert old.startswith("launch.gpus is now called gpu_placement")
    assert other.startswith("inference.cache_fraction: expected a valid number")


def test_an_old_keyword_is_refused_with_its_new_name():
    with pytest.raises(ConfigInvalid, match=r"EvalSource\.attempts is now called max_tries"):
        EvalSource(attempts=1)  # pyright: ignore[reportCallIssue]


def test_an_old_key_of_a_plugin_table_is_refused_with_its_new_name():
    with pytest.raises(ConfigInvalid, match=r"harness\.attempts is now called max_tries"):
        parse_section(Source, {"attempts": 1}, key="harness")


def test_the_configuration_of_an_older_run_is_read(file):
    config = read_stored_config(Run, file)
    assert config.record_batches
    assert config.launch.gpu_placement == "colocated"
    assert config.inference == Remote(memory_utilization=0.9)
    assert [source.max_tries for source in config.eval] == [1, 2]
    assert [source.pass_threshold for source in config.eval] == [1.0, 0.5]


def test_a_new_key_wins_over_the_old_one_in_a_stored_configuration(tmp_path):
    (tmp_path / "config.toml").write_text("record = true\nrecord_batches = false\n", encoding="utf-8")
    assert not read_stored_config(Run, tmp_path / "config.toml").record_batches


def test_other_problems_of_a_stored_configuration_are_errors(tmp_path):
    (tmp_path / "config.toml").write_text("unknown = true\n", encoding="utf-8")
    with pytest.raises(ConfigInvalid, match="unknown key"):
        read_stored_config(Run, tmp_path / "config.toml")


def test_a_table_can_be_given_the_names_under_which_it_is_stored():
    table = {"pass_threshold": 0.5, "max_tries": 2, "name": "a"}
    assert to_old_keys(EvalSource, table) == {"threshold": 0.5, "attempts": 2, "name": "a"}
    assert to_old_keys(Launch, {"gpu_placement": "colocated"}) == {"gpus": "shared"}
    assert to_new_keys(EvalSource, to_old_keys(EvalSource, table)) == table
