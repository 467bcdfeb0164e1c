"""Rollouts: one attempt at one task, from an empty work directory to a scored trace.

One idea: **a bad rollout is data.** A mistake of the agent ends the attempt, which is then scored like any other. A
system failure says nothing about the agent, so the attempt is run again. The name of the failure tells which of the two
it was.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
