"""The arguments of `rf.evaluate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.core.config import expand_model_name, get_explicit_values, parse_section
from ramify.env import Taskset
from ramify.env.taskset_id import build_taskset_table
from ramify.rollout.evals.config import EvalConfig

EvalInput = EvalConfig | Mapping[str, Any] | Taskset | type[Taskset] | str


def read_config(config_input: EvalInput, settings: Mapping[str, Any]) -> EvalConfig:
    """Return the configuration given by `config_input`, with the keys of `settings` set in it."""
    if isinstance(config_input, EvalConfig):
        if not settings:
            return config_input
        config_input = get_explicit_values(config_input)
    table = expand_model_name(
        {**(config_input if isinstance(config_input, Mapping) else {"taskset": config_input}), **settings}
    )
    if "taskset" in table:
        table["taskset"] = build_taskset_table(table["taskset"], Path(table.get("output", "outputs")))
    return parse_section(EvalConfig, table, key="eval")
