"""From a run's `[monitor]` section to its sinks."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from ramify.config import raise_config_invalid
from ramify.monitor import sinks
from ramify.monitor.sink_threads import MonitorSinks, SinkFactory
from ramify.orchestrate.config import RunConfig, TensorboardConfig, TrackioConfig, WandbConfig


def check_sinks_installed(config: RunConfig) -> None:
    """Refuse, with ConfigInvalid, a sink whose library is not installed."""
    absent = [
        (f"monitor.sinks.{number}", f"{sink.type} is not installed; pip install 'ramify[{sink.type}]'")
        for number, sink in enumerate(config.monitor.sinks)
        if find_spec(sink.type) is None
    ]
    if absent:
        raise_config_invalid(absent)


def open_monitor_sinks(config: RunConfig, print_line: Callable[[str], None] = print) -> MonitorSinks:
    """The sinks of a run: the log always, and those it names. What they complain of is said to `say`."""
    name, path, told = config.path.name, config.path, config.model_dump(mode="json")
    found: dict[str, SinkFactory] = {"console": lambda: sinks.ConsoleSink(print_line)}
    for number, sink in enumerate(config.monitor.sinks):
        match sink:
            case WandbConfig(project=project, entity=entity):
                opening = partial(sinks.WandbSink, name, path, told, project=project, entity=entity)
            case TrackioConfig(project=project):
                opening = partial(sinks.TrackioSink, name, told, project=project)
            case TensorboardConfig():
                opening = partial(sinks.TensorBoardSink, path / "tensorboard")
        found[sink.type if sink.type not in found else f"{sink.type}.{number}"] = opening
    return MonitorSinks(found, print_line=print_line)
