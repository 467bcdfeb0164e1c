"""What every failure declares, enforced where the class is written.

A subclass that forgets whom to blame would be discovered in the one run that hits it. So the class statement itself
asks (`class WorkerDied(RamifyError, blame="system", retryable=True)`) and refuses an answer that is missing, or a
name that is taken: the name is what travels between processes, so it can only mean one thing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Blame = Literal["policy", "system"]

_failure_classes: dict[str, type["RamifyError"]] = {}


def failure_classes() -> Mapping[str, type["RamifyError"]]:
    """Every failure class defined so far, by name (read only)."""
    return MappingProxyType(_failure_classes)


class RamifyError(Exception):
    """A failure with a name. Constructed from its message alone, so that any process can build it again."""

    name: str = "RamifyError"
    blame: Blame
    retryable: bool
    remote_traceback: str | None = None  # where another process raised it, when it came over the wire

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __init_subclass__(cls, *, blame: Blame | None = None, retryable: bool | None = None) -> None:
        super().__init_subclass__()
        name = cls.__name__
        if name in _failure_classes:
            raise TypeError(
                f"failure {name} is already defined in {_failure_classes[name].__module__}; names are unique"
            )
        blame = getattr(cls, "blame", None) if blame is None else blame
        retryable = getattr(cls, "retryable", None) if retryable is None else retryable
        if blame is None or blame not in get_args(Blame):
            raise TypeError(f"failure {name} must declare blame='policy' or blame='system', found {blame!r}")
        if not isinstance(retryable, bool):
            raise TypeError(f"failure {name} must declare retryable=True or retryable=False, found {retryable!r}")
        cls.name, cls.blame, cls.retryable = name, blame, retryable
        _failure_classes[name] = cls
