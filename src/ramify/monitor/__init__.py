"""Where the numbers of a run go besides its own tables.

A monitor is a convenience: whatever it does, the run goes on. So each sink lives in a thread of its own behind a
bounded queue; one that fails is told of, one that hangs is left behind, and nobody waits for it beyond a deadline.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.monitor.monitors import Monitors as Monitors
    from ramify.monitor.names import NAMES as NAMES
    from ramify.monitor.opening import check_sinks as check_sinks
    from ramify.monitor.opening import open_monitors as open_monitors
    from ramify.monitor.sample import Sample as Sample
    from ramify.monitor.sample import samples_of as samples_of
    from ramify.monitor.sink import Sink as Sink

_FACE = {
    "NAMES": "names",
    "Monitors": "monitors",
    "Sample": "sample",
    "Sink": "sink",
    "check_sinks": "opening",
    "open_monitors": "opening",
    "samples_of": "sample",
}

__all__ = ["NAMES", "Monitors", "Sample", "Sink", "check_sinks", "open_monitors", "samples_of"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.monitor' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.monitor.{_FACE[name]}"), name)
    globals()[name] = value
    return value
