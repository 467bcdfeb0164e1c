from .base import ExecResult as ExecResult
from .base import Runtime as Runtime
from .base import RuntimeProcess as RuntimeProcess
from .config import LocalRuntimeConfig as LocalRuntimeConfig
from .config import RuntimeConfig as RuntimeConfig
from .local import LocalRuntime as LocalRuntime
