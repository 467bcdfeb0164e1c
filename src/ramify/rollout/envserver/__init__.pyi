from .client import EnvClient as EnvClient
from .config import EnvServerConfig as EnvServerConfig
from .config import ServedSourceConfig as ServedSourceConfig
from .server import EnvServer as EnvServer
from .server_process import EnvServerProcess as EnvServerProcess
