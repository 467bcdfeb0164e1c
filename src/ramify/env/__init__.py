"""Environments: tasks, and the code that judges, helps and talks to the agent that solves them.

One idea: everything a user writes is plain Python that is called with what it names. Nothing here knows how a rollout
is run; `rollout` and `harness` call what they find.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
