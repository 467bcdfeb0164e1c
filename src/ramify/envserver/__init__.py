"""Env servers: rollouts in worker processes, behind one address that outlives any of them.

One idea: nothing is believed that is not seen. A worker is dead when its process is gone, hung when its event loop has
stood still for too long, ready when it has said so; what it held runs again elsewhere, a bounded number of times.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
