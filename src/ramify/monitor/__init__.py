"""Where the numbers of a run go besides its own tables.

A monitor is a convenience: whatever it does, the run goes on. So each sink lives in a thread of its own behind a
bounded queue; one that fails is told of, one that hangs is left behind, and nobody waits for it beyond a deadline.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
