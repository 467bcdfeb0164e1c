# Triton's own types do not describe what its decorators do to a kernel, so nothing of it is checked.
from typing import Any

def __getattr__(name: str) -> Any: ...
