"""Env servers: rollouts in worker processes, behind one address that outlives any of them.

One idea: worker state is observed, never assumed. A worker is lost when its process has exited, hung when its event
loop has not run for too long, ready when it has reported so. The attempts of a lost worker are rerun on other workers,
a bounded number of times.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
