from .config import ContainerRuntimeConfig as ContainerRuntimeConfig
from .config import HostedRuntimeConfig as HostedRuntimeConfig
from .config import LocalRuntimeConfig as LocalRuntimeConfig
from .config import SandboxRuntimeConfig as SandboxRuntimeConfig
from .container import ContainerRuntime as ContainerRuntime
from .hosted import HostedRuntime as HostedRuntime
from .local import LocalRuntime as LocalRuntime
from .sandbox import SandboxRuntime as SandboxRuntime
