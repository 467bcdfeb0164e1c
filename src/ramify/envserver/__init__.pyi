from .child import EnvServerChild as EnvServerChild
from .client import EnvClient as EnvClient
from .config import EnvServerConfig as EnvServerConfig
from .config import ServedSourceConfig as ServedSourceConfig
from .server import EnvServer as EnvServer
