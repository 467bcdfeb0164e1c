"""Rollouts: one attempt at one task, from an empty box to a scored trace.

One idea: **a bad rollout is data.** What the agent did wrong ends the attempt and is scored like any other; what
happened to it is no evidence about the agent, so the attempt is run again. Which of the two it was, the failure's name
says.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
