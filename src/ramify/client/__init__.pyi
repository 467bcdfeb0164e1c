from .client import Client as Client
from .completion import Completion as Completion
from .completion import Sampling as Sampling
from .config import ClientConfig as ClientConfig
from .control import Acknowledgement as Acknowledgement
