"""Loads the tasks of an eval in a thread, so that the deadline also holds for a `load` that blocks."""

import sys
import threading
import traceback

from ramify.env.hook_threads import run_in_hook_thread
from ramify.errors import DeadlineExceeded
from ramify.evals.config import EvalConfig
from ramify.evals.plan import PlannedRollout, plan_rollouts
from ramify.rollout import Environment
from ramify.rollout.timeout import fail_after


async def load_plan(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    """Return the pairs of an eval. Raises DeadlineExceeded, with the stack of `load`, after `timeouts.load` seconds."""
    timeout, thread_id = config.timeouts.load, 0

    def load() -> list[PlannedRollout]:
        nonlocal thread_id
        thread_id = threading.get_ident()
        return plan_rollouts(environment, config)

    operation = f"load of taskset {environment.name}"
    try:
        async with fail_after(timeout, operation):
            return await run_in_hook_thread(load, {})
    except DeadlineExceeded as error:
        frame = sys._current_frames().get(thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        message = f"{operation} took longer than {timeout:g} s (timeouts.load); it stands at:\n{stack}"
        raise DeadlineExceeded(message.rstrip()) from error
