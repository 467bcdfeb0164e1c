"""The run on disk: one directory that stays consistent if any process dies at any moment.

One idea: a row is committed only after the data it points to is durable. Traces are appended to segments, which are
synced first; one SQLite transaction then makes them part of the run. Bytes after the last transaction are truncated
when the run is opened again. All other data of a run is in the same database, behind the same writer.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
