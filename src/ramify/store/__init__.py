"""The run on disk: one directory that survives the death of any process at any moment.

One idea: a row is true only when what it points to is safe. Traces go into append-only segments and are synced first;
one SQLite transaction then makes them part of the run. Whatever lies behind the last transaction never happened, and is
cut away when the run is opened again. The same file and the same writer hold all a run knows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
