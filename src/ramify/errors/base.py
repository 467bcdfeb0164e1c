"""The base class of all failures, which checks the declarations of its subclasses.

A subclass must declare its blame and whether it is retryable, such as `class WorkerDied(RamifyError, blame="system",
retryable=True)`. A missing declaration or a duplicate name raises when the class is defined, not in the first run that
hits it. Names are unique, because they identify the failure in other processes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

Blame = Literal["policy", "system"]

_failure_classes: dict[str, type["RamifyError"]] = {}


def failure_classes() -> Mapping[str, type["RamifyError"]]:
    """Return a read-only view of all failure classes defined so far, by name."""
    return MappingProxyType(_failure_classes)


class RamifyError(Exception):
    """A failure with a name. It is constructed from its message alone, so that any process can rebuild it.

    `remote_traceback` is the traceback in the process that raised it, if that is another one.
    """

    name: str = "RamifyError"
    blame: Blame
    retryable: bool
    remote_traceback: str | None = None

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
            raise TypeError(f"failure {name} must declare blame='policy' or blame='system', got {blame!r}")
        if not isinstance(retryable, bool):
            raise TypeError(f"failure {name} must declare retryable=True or retryable=False, got {retryable!r}")
        cls.name, cls.blame, cls.retryable = name, blame, retryable
        _failure_classes[name] = cls
