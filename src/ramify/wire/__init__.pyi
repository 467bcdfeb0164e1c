from .address import is_local as is_local
from .client import Client as Client
from .frames import VERSION as VERSION
from .message import Message as Message
from .pulse import Pulse as Pulse
from .server import Request as Request
from .server import Server as Server
from .settings import Settings as Settings
