"""Old names of keys and flags are refused with the new ones, and older runs keep their identity."""

from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.config import Config, read_stored_config
from ramify.config.schema import get_renamed_keys, get_renamed_values
from ramify.env.plugin import update_plugin_keys
from ramify.envserver.config import EnvServerConfig
from ramify.evals.config import EvalConfig
from ramify.launch.completion import _dump_curricula
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.filters.gibberish import GibberishConfig
from ramify.orchestrate.filters.repetition import RepetitionConfig
from ramify.runtime.config import LocalRuntimeConfig
from ramify.train.process_config import TrainerProcessConfig
from ramify.train.sft.config import SftConfig

OLDER_RUNS = Path(__file__).parents[1] / "fixtures" / "older_runs" / "runs"
assert all((EnvServerConfig, GibberishConfig, RepetitionConfig, LocalRuntimeConfig, TrainerProcessConfig))  # loaded


def list_config_classes(base: type[Config] = Config) -> list[type[Config]]:
    return [cls for child in base.__subclasses__() for cls in (child, *list_config_classes(child))]


def test_every_renamed_key_leads_to_a_key_and_no_old_name_is_in_use():
    renamed = [cls for cls in list_config_classes() if cls.__module__.startswith("ramify.") and get_renamed_keys(cls)]
    assert len(renamed) > 20
    for cls in renamed:
        keys = get_renamed_keys(cls)
        assert set(keys.values()) <= set(cls.model_fields), cls
        assert not set(keys) & set(cls.model_fields), cls
        assert set(get_renamed_values(cls)) <= set(cls.model_fields), cls


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["rl", "reverse-text", "--orchestrator.max_off_policy", "1"],
            "orchestrator.max_off_policy is now called max_staleness",
        ),
        (["rl", "reverse-text", "--train.0.attempts", "1"], "train.0.attempts is now called max_tries"),
        (["rl", "reverse-text", "--launch.gpus", "shared"], "its value 'shared' is now 'colocated'"),
        (["rl", "reverse-text", "--train.0.runtime.keep", "true"], "runtime.keep is now called keep_workdir"),
        (["eval", "reverse-text", "--threshold", "0.5"], "threshold is now called pass_threshold"),
        (["eval", "reverse-text", "--keep"], "--keep is now called --keep-workdirs"),
        (["eval", "reverse-text", "--show"], "--show is now called --show-traces"),
        (["serve", "--inference.memory", "0.3"], "inference.memory is now called kv_memory_fraction"),
    ],
)
def test_old_flags_are_refused_with_the_new_name(command, message, capsys):
    assert main([*command, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_the_configuration_of_older_runs_is_read():
    for run in ("finished", "killed"):
        config = read_stored_config(RunConfig, OLDER_RUNS / run / "config.toml")
        assert config.orchestrator.max_staleness == 1
        assert config.train[0].max_tries == 3


def test_an_older_eval_is_read_with_the_keys_of_its_plugins(tmp_path):
    tables = """
attempts = 2
threshold = 0.5
taskset = { id = "reverse-text" }
harness = { id = "chat", malformed_limit = 5 }
runtime = { id = "local", keep = true }
"""
    (tmp_path / "config.toml").write_text(tables, encoding="utf-8")
    config = read_stored_config(EvalConfig, tmp_path / "config.toml")
    assert (config.max_tries, config.pass_threshold) == (2, 0.5)
    assert update_plugin_keys("harness", config.harness) == {"id": "chat", "max_malformed_replies": 5}
    assert update_plugin_keys("runtime", config.runtime) == {"id": "local", "keep_workdir": True}


def test_the_identity_of_a_run_has_the_keys_that_earlier_versions_stored():
    source = {"taskset": {"id": "reverse-text"}, "harness": {"id": "chat", "max_malformed_replies": 5}}
    harness = {"id": "chat", "malformed_limit": 5}
    assert RunConfig.model_validate({"train": [source]}).identity["train"]["reverse-text"]["harness"] == harness
    assert EvalConfig.model_validate(source).identity["harness"] == harness


def test_the_identity_of_an_sft_run_has_the_keys_that_earlier_versions_stored():
    config = SftConfig.model_validate(
        {"data": {"path": "chats.jsonl", "split": "train"}, "validation": {"fraction": 0.1}}
    )
    identity = config.identity
    assert identity["data"] == {
        "path": "chats.jsonl",
        "part": "train",
        "messages": "messages",
        "tools": "tools",
        "prompt": "prompt",
        "completion": "completion",
        "roles": ["assistant"],
    }
    assert identity["lora"] == {"enabled": False, "rank": 16, "alpha": 32, "targets": []}
    assert identity["held_out"] == 0.1


def test_the_curricula_of_a_finished_run_have_the_keys_that_earlier_versions_stored():
    source = {"taskset": {"id": "reverse-text"}, "curriculum": {"type": "pools", "recent_groups": 2}}
    curricula = _dump_curricula(RunConfig.model_validate({"train": [source]}))
    assert curricula["reverse-text"] == {
        "type": "pools",
        "easy": 0.1,
        "hard": 0.2,
        "easy_above": 0.9,
        "hard_below": 0.1,
        "recent": 2,
    }
