"""The part of `lazy_loader` that Ramify uses; the library has no type information."""

from collections.abc import Callable
from typing import Any

def attach_stub(
    package_name: str, filename: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]: ...
