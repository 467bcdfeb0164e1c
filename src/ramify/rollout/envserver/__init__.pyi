from .client import EnvClient as EnvClient
from .client import EnvServerProcess as EnvServerProcess
from .config import EnvServerConfig as EnvServerConfig
from .server import EnvServer as EnvServer
