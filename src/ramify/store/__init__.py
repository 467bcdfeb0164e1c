"""The run on disk: one directory that survives the death of any process at any moment.

One idea: a row is true only when what it points to is safe. Traces go into append-only segments and are synced first;
one SQLite transaction then makes them part of the run. Whatever lies behind the last transaction never happened, and is
cut away when the run is opened again. The same file and the same writer hold all a run knows.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.store.directory import open_run as open_run
    from ramify.store.directory import set_aside as set_aside
    from ramify.store.exporting import FORMATS as FORMATS
    from ramify.store.exporting import export as export
    from ramify.store.journal import Journal as Journal
    from ramify.store.ledger import Ledger as Ledger
    from ramify.store.names import default_name as default_name
    from ramify.store.rows import Row as Row
    from ramify.store.states import DropReason as DropReason
    from ramify.store.states import State as State
    from ramify.store.store import RunStore as RunStore
    from ramify.store.writer import naming as naming

_FACE = {
    "DropReason": "ramify.store.states",
    "FORMATS": "ramify.store.exporting",
    "Journal": "ramify.store.journal",
    "Ledger": "ramify.store.ledger",
    "Row": "ramify.store.rows",
    "RunStore": "ramify.store.store",
    "State": "ramify.store.states",
    "default_name": "ramify.store.names",
    "export": "ramify.store.exporting",
    "naming": "ramify.store.writer",
    "open_run": "ramify.store.directory",
    "set_aside": "ramify.store.directory",
}

__all__ = [
    "FORMATS",
    "DropReason",
    "Journal",
    "Ledger",
    "Row",
    "RunStore",
    "State",
    "default_name",
    "export",
    "naming",
    "open_run",
    "set_aside",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.store' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
