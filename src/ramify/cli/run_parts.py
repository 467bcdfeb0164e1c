"""What a command that is one process of a run takes from the configuration of the whole run."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ramify.core.errors import ConfigInvalid
from ramify.launch.process_configs import build_env_server_config, build_serve_config, build_trainer_config
from ramify.orchestrate.config import RunConfig


def extract_server(config: RunConfig, _flags: Namespace, _args: Sequence[str]) -> dict[str, Any]:
    """Return the engine's part of a run's configuration."""
    return build_serve_config(config)


def extract_trainer(config: RunConfig, flags: Namespace, _args: Sequence[str]) -> dict[str, Any]:
    """Return the trainer's part of a run's configuration; without an orchestrator if a recording is replayed."""
    part = build_trainer_config(config)
    return {**part, "address": None} if flags.replay else part


def extract_env_server(config: RunConfig, _flags: Namespace, args: Sequence[str]) -> dict[str, Any]:
    """Return the part of one source of a run's configuration."""
    sources = (arg.partition("=")[2] or following for arg, following in zip(args, [*args[1:], ""]) if _is_source(arg))
    table = build_env_server_config(config, next(sources, None))
    if "inference" not in table and not any(arg.startswith("--inference") for arg in args):
        raise ConfigInvalid("the run starts its own engine; give its address with -b URL", key="inference")
    return table


def _is_source(arg: str) -> bool:
    return arg.partition("=")[0] == "--source"
