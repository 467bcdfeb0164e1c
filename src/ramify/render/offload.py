"""Rendering and parsing beside an event loop: small work is done at once, large work in a thread.

A thread costs about as much as a small reply. A large one would hold up every other coroutine of the process, and with
them heartbeats, deadlines and other people's streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE_TOKENS = 1024
LARGE_CHARACTERS = 16_384


async def offload(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `function`, which runs in a thread if the work is large."""
    if is_large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
