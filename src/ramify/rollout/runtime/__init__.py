"""Runtimes: where an agent's programs run.

One idea: each rollout gets its own runtime and leaves no files or processes behind, however it ends. `local` runs
programs in a directory of this machine without isolation, for code that you would run in your own shell.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
