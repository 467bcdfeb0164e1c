"""Pauses the garbage collector while the modules of a command, or torch and transformers, are imported.

The imports create up to a million objects that stay. Collections that traverse them find nothing, and take a tenth of
the time of the imports.
"""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def pause_garbage_collection() -> Generator[None]:
    """Import modules in this context without collections; the collector continues afterwards if it ran before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
