"""The orchestrator: which tasks are tried, what is learnt from them, and when.

One idea: everything that decides is a small state machine without clock or I/O (admission, dispatch, groups, sources),
everything it decided is a row of the ledger before it is done, and processes only carry out rows. Names load when they
are used; nothing here imports torch or an environment.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
