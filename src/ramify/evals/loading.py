"""Loads the tasks of an eval in a thread, so that the deadline also holds for a `load` that blocks."""

import sys
import threading
import traceback

from ramify.env.hook_threads import run_in_hook_thread
from ramify.errors import DeadlineExceeded
from ramify.evals.config import EvalConfig
from ramify.evals.plan import Pair, pairs_of
from ramify.rollout import Environment
from ramify.rollout.timeout import fail_after


async def load_pairs(environment: Environment, config: EvalConfig) -> list[Pair]:
    """Return the pairs of an eval. Raises DeadlineExceeded, with the stack of `load`, after `timeouts.load` seconds."""
    seconds, thread = config.timeouts.load, 0

    def load() -> list[Pair]:
        nonlocal thread
        thread = threading.get_ident()
        return pairs_of(environment, config)

    what = f"load of taskset {environment.name}"
    try:
        async with fail_after(seconds, what):
            return await run_in_hook_thread(load, {})
    except DeadlineExceeded as error:
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        message = f"{what} took longer than {seconds:g} s (timeouts.load); it stands at:\n{stack}"
        raise DeadlineExceeded(message.rstrip()) from error
