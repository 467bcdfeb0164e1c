"""Build the sinks of a run from its `[monitor]` section."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from ramify.core.errors import ConfigInvalid
from ramify.launch.monitor.sink_threads import MonitorSinks, SinkFactory
from ramify.launch.monitor.sinks import ConsoleSink, TensorBoardSink, TrackioSink, WandbSink
from ramify.orchestrate.config import RunConfig, TensorboardConfig, TrackioConfig, WandbConfig


def check_sinks_installed(config: RunConfig) -> None:
    """Raise ConfigInvalid if the library of a sink is not installed."""
    missing = [
        (f"monitor.sinks.{index}", f"{sink.type} is not installed; pip install 'ramify[{sink.type}]'")
        for index, sink in enumerate(config.monitor.sinks)
        if find_spec(sink.type) is None
    ]
    if missing:
        raise ConfigInvalid(problems=missing)


def open_monitor_sinks(config: RunConfig, print_line: Callable[[str], None] = print) -> MonitorSinks:
    """Open the sinks of a run: always the console, and those that the configuration names.

    `print_line` prints the console's lines and warnings about sinks.
    """
    name, path, settings = config.path.name, config.path, config.model_dump(mode="json")
    factories: dict[str, SinkFactory] = {"console": lambda: ConsoleSink(print_line)}
    for index, sink in enumerate(config.monitor.sinks):
        match sink:
            case WandbConfig(project=project, entity=entity):
                factory = partial(WandbSink, name, path, settings, project=project, entity=entity)
            case TrackioConfig(project=project):
                factory = partial(TrackioSink, name, settings, project=project)
            case TensorboardConfig():
                factory = partial(TensorBoardSink, path / "tensorboard")
        factories[sink.type if sink.type not in factories else f"{sink.type}.{index}"] = factory
    return MonitorSinks(factories, print_line=print_line)
