from .config import LocalRuntimeConfig as LocalRuntimeConfig
from .local import LocalRuntime as LocalRuntime
