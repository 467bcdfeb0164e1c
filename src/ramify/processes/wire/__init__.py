"""The wire: requests, streamed replies and cancels between processes, over ZMQ.

A connection consists of two numbered streams, one per direction. The sender keeps a message until it is acknowledged,
so a broken connection neither loses nor repeats messages. A thread beside the event loop runs the timers: a busy loop
delays replies, never heartbeats.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
