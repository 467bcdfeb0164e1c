"""Evaluation: a taskset, a model, so many tasks, so many repetitions of each, and what that says.

One idea: an eval is a table of (task, repetition) pairs that is to be filled. Whatever ends it, the same command fills
what is missing; whatever changes, a pair is never filled twice. `evaluate` is the same from Python.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
