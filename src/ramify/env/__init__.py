"""Environments: tasks, and the code that scores an agent, gives it tools and plays its user.

One idea: a user writes plain Python functions, and each is called with exactly the arguments its signature names.
Nothing here knows how a rollout runs; `rollout` and `harness` call the hooks that a taskset defines.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
