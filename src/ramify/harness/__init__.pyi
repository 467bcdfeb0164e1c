from .base import Harness as Harness
from .chat import ChatHarness as ChatHarness
from .config import ChatHarnessConfig as ChatHarnessConfig
from .config import HarnessConfig as HarnessConfig
from .config import ServedModel as ServedModel
