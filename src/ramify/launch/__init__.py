"""One command for a whole run: what is started, where, and what becomes of it.

A run is several processes that may die on their own. The plan says which, with which cores, GPUs and ports, and can be
read before anything starts (`--dry-run`); the supervisor makes it true, keeps it true, and leaves nothing behind.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
