from .factory import check_sinks_installed as check_sinks_installed
from .factory import open_monitor_sinks as open_monitor_sinks
from .metric_names import METRIC_DESCRIPTIONS as METRIC_DESCRIPTIONS
from .rollout_samples import RolloutSample as RolloutSample
from .rollout_samples import build_samples as build_samples
from .sink_threads import MonitorSinks as MonitorSinks
from .sinks import Sink as Sink
