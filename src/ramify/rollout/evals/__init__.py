"""Evaluation: run a model on n tasks of a taskset, r rollouts each, and report scores with confidence intervals.

One idea: an eval is a table of (task, repetition) pairs. A rerun of the same command runs the rollouts that are missing
or failed because of the system, and never a finished one. `evaluate` is the entry point from Python.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
