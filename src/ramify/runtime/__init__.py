"""Runtimes: where an agent's programs run.

One idea: a rollout gets a box of its own and leaves nothing behind, however it ends. `local` is a directory on this
machine, for code one trusts as far as one's own shell.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
