from .base import Program as Program
from .base import Ran as Ran
from .base import Runtime as Runtime
from .config import LocalConfig as LocalConfig
from .config import RuntimeConfig as RuntimeConfig
from .local import LocalRuntime as LocalRuntime
