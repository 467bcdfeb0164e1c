"""Run small rendering and parsing work in the event loop and large work in a thread.

Handing work to a thread costs about as much as parsing a small reply. Parsing a large one in the loop would hold up all
other coroutines of the process, and with them heartbeats, timeouts and the streams of other clients.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OFFLOAD_MIN_TOKENS = 1024
OFFLOAD_MIN_CHARS = 16_384


async def offload(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` and return its result; run it in a thread if `is_large`."""
    if is_large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
