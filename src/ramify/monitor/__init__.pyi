from .monitors import Monitors as Monitors
from .names import NAMES as NAMES
from .opening import check_sinks as check_sinks
from .opening import open_monitors as open_monitors
from .sample import Sample as Sample
from .sample import samples_of as samples_of
from .sink import Sink as Sink
