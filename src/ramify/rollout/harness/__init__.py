"""Harnesses: the agent programs that solve a task.

One idea: a harness only has to send its model calls to the rollout's `RolloutSession`, in process or over HTTP. What it
does between two calls is up to the harness. `chat` is the loop that most tasks need.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
