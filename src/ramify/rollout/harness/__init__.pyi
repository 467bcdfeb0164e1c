from .base import Harness as Harness
from .config import HarnessConfig as HarnessConfig
