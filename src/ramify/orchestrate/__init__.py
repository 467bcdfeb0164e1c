"""The orchestrator: issues groups, scores them, forms batches, and keeps the weights of the engines up to date.

All decisions are made by small state machines without clock or I/O (admission, attempt queue, group tracker, source
mix). Every decision is written to the ledger before it is executed, so a crash loses nothing. Names are imported when
they are used; nothing here imports torch or an environment.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
