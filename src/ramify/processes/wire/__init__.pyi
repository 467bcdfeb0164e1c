from .address import is_local as is_local
from .client import WireClient as WireClient
from .loop_monitor import LoopMonitor as LoopMonitor
from .message import PROTOCOL_VERSION as PROTOCOL_VERSION
from .message import WireMessage as WireMessage
from .message import WireSettings as WireSettings
from .server import IncomingRequest as IncomingRequest
from .server import WireServer as WireServer
