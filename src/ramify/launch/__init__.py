"""One command for a whole run: what is started, where, and what becomes of it.

A run is several processes that may die on their own. The plan says which, with which cores, GPUs and ports, and can be
read before anything starts (`--dry-run`); the supervisor makes it true, keeps it true, and leaves nothing behind.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.launch.plan import Plan as Plan
    from ramify.launch.plan import plan_of as plan_of
    from ramify.launch.process import Entry as Entry
    from ramify.launch.process import Role as Role
    from ramify.launch.run import rl as rl
    from ramify.launch.supervisor import Outcome as Outcome
    from ramify.launch.supervisor import Supervisor as Supervisor

_FACE = {
    "Entry": "process",
    "Outcome": "supervisor",
    "Plan": "plan",
    "Role": "process",
    "Supervisor": "supervisor",
    "plan_of": "plan",
    "rl": "run",
}

__all__ = ["Entry", "Outcome", "Plan", "Role", "Supervisor", "plan_of", "rl"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.launch' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.launch.{_FACE[name]}"), name)
    globals()[name] = value
    return value
