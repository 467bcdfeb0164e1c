from .address import is_local as is_local
from .client import WireClient as WireClient
from .headers import PROTOCOL_VERSION as PROTOCOL_VERSION
from .headers import WireMessage as WireMessage
from .headers import WireSettings as WireSettings
from .loop_monitor import LoopMonitor as LoopMonitor
from .server import IncomingRequest as IncomingRequest
from .server import WireServer as WireServer
