"""The orchestrator: which tasks are tried, what is learnt from them, and when.

One idea: everything that decides is a small state machine without clock or I/O (admission, dispatch, groups, sources),
everything it decided is a row of the ledger before it is done, and processes only carry out rows. Names load when they
are used; nothing here imports torch or an environment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.orchestrate.admission import Admission as Admission
    from ramify.orchestrate.admission import Shape as Shape
    from ramify.orchestrate.algorithms import Algorithm as Algorithm
    from ramify.orchestrate.algorithms import AlgorithmConfig as AlgorithmConfig
    from ramify.orchestrate.batch import Member as Member
    from ramify.orchestrate.concurrency import Concurrency as Concurrency
    from ramify.orchestrate.config import RunConfig as RunConfig
    from ramify.orchestrate.core import Core as Core
    from ramify.orchestrate.dispatch import Dispatch as Dispatch
    from ramify.orchestrate.filters import Filter as Filter
    from ramify.orchestrate.filters import FilterConfig as FilterConfig
    from ramify.orchestrate.groups import GroupRun as GroupRun
    from ramify.orchestrate.sources import Mix as Mix

_FACE = {
    "Admission": "admission",
    "Algorithm": "algorithms",
    "AlgorithmConfig": "algorithms",
    "Concurrency": "concurrency",
    "Core": "core",
    "Dispatch": "dispatch",
    "Filter": "filters",
    "FilterConfig": "filters",
    "GroupRun": "groups",
    "Member": "batch",
    "Mix": "sources",
    "RunConfig": "config",
    "Shape": "admission",
}

__all__ = [
    "Admission",
    "Algorithm",
    "AlgorithmConfig",
    "Concurrency",
    "Core",
    "Dispatch",
    "Filter",
    "FilterConfig",
    "GroupRun",
    "Member",
    "Mix",
    "RunConfig",
    "Shape",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.orchestrate' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.orchestrate.{_FACE[name]}"), name)
    globals()[name] = value
    return value
