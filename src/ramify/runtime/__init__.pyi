from .config import LocalRuntimeConfig as LocalRuntimeConfig
from .config import SandboxRuntimeConfig as SandboxRuntimeConfig
from .local import LocalRuntime as LocalRuntime
from .sandbox import SandboxRuntime as SandboxRuntime
