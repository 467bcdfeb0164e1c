"""Sinks for the metrics of a run, besides the run's own tables.

A sink must never stop the run. So each one lives in a thread of its own behind a bounded queue: a failing sink is
logged, a hanging sink is left behind at the deadline.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
