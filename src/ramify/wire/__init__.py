"""The wire: requests, streamed replies and cancels between processes, over ZMQ.

One idea: a connection is two numbered streams. A frame is kept until the other side says it has it, so a connection
that breaks loses nothing and repeats nothing, and what is left of a request is its number, its deadline and its answer.
A thread beside the event loop sees to the clock: a loop that is busy delays answers, never heartbeats.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
