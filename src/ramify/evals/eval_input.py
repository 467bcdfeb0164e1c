"""The arguments of `rf.evaluate`, and the rows of its result as plain dicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.config import parse_section
from ramify.env import Taskset
from ramify.env.taskset_id import build_taskset_table
from ramify.evals.config import EvalConfig
from ramify.evals.summary import total_seconds
from ramify.interactive import expand_model_name, get_explicit_values
from ramify.store import RolloutRecord

EvalInput = EvalConfig | Mapping[str, Any] | Taskset | type[Taskset] | str


def read_config(config_input: EvalInput, settings: Mapping[str, Any]) -> EvalConfig:
    """Return the configuration of an eval from a table of settings or a taskset, and further settings."""
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


def flatten_row(row: RolloutRecord) -> dict[str, Any]:
    """Return a rollout as columns: rewards and metrics by name, counts and times."""
    summary = row.summary
    counts = {name: summary.get(name) for name in ("stop", "truncated", "calls", "input", "output")}
    return {
        "id": row.id,
        "task": row.task,
        "repetition": row.repetition,
        "reward": row.reward,
        "failure": row.failure,
        **{f"reward/{name}": value for name, value in summary.get("rewards", {}).items()},
        **{f"metric/{name}": value for name, value in summary.get("metrics", {}).items()},
        **counts,
        "seconds": total_seconds(row),
    }
