from .base import Harness as Harness
from .chat import ChatHarness as ChatHarness
from .config import ChatHarnessConfig as ChatHarnessConfig
from .config import ExternalModelConfig as ExternalModelConfig
from .config import HarnessConfig as HarnessConfig
from .program import ProgramHarness as ProgramHarness
from .program_config import ProgramHarnessConfig as ProgramHarnessConfig
