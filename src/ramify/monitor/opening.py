"""From a run's `[monitor]` section to its sinks."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from ramify.config import raise_config_invalid
from ramify.monitor import sinks
from ramify.monitor.monitors import Monitors, Open
from ramify.orchestrate.config import RunConfig, TensorboardConfig, TrackioConfig, WandbConfig


def check_sinks(config: RunConfig) -> None:
    """Refuse, with ConfigInvalid, a sink whose library is not installed."""
    absent = [
        (f"monitor.sinks.{number}", f"{sink.type} is not installed; pip install 'ramify[{sink.type}]'")
        for number, sink in enumerate(config.monitor.sinks)
        if find_spec(sink.type) is None
    ]
    if absent:
        raise_config_invalid(absent)


def open_monitors(config: RunConfig, say: Callable[[str], None] = print) -> Monitors:
    """The sinks of a run: the log always, and those it names. What they complain of is said to `say`."""
    name, path, told = config.path.name, config.path, config.model_dump(mode="json")
    found: dict[str, Open] = {"console": lambda: sinks.Console(say)}
    for number, sink in enumerate(config.monitor.sinks):
        match sink:
            case WandbConfig(project=project, entity=entity):
                opening = partial(sinks.Wandb, name, path, told, project=project, entity=entity)
            case TrackioConfig(project=project):
                opening = partial(sinks.Trackio, name, told, project=project)
            case TensorboardConfig():
                opening = partial(sinks.Tensorboard, path / "tensorboard")
        found[sink.type if sink.type not in found else f"{sink.type}.{number}"] = opening
    return Monitors(found, say=say)
