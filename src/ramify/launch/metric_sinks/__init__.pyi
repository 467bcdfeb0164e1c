from .sink_threads import MonitorSinks as MonitorSinks
from .sink_threads import check_sinks_installed as check_sinks_installed
from .sink_threads import open_monitor_sinks as open_monitor_sinks
from .sinks import RolloutSample as RolloutSample
from .sinks import Sink as Sink
from .sinks import build_samples as build_samples
