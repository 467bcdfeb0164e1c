"""The rollouts of an eval: the first n tasks of the taskset, r repetitions of each, and which of them are missing."""

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from ramify.core.async_calls import call_storage, fail_after
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env import Task
from ramify.env.hook import run_in_hook_thread
from ramify.env.task import IDENTITY_DIGITS
from ramify.infer.dialects.media import FILE_SCHEME, read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.processes.wire.loop_monitor import format_thread_stack
from ramify.rollout import Environment
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.evals.rows import make_rollout_id
from ramify.run.store import RolloutRecord
from ramify.trace import Media


async def compute_task_digest(task: Task) -> str:
    """Return the digest of a task's content, and of the image files that its prompt names with `file://`.

    An image that cannot be read is left out: the rollout fails with the reason.
    """
    if isinstance(task.prompt, str) or FILE_SCHEME not in str(task.prompt):
        return task.content_digest
    hashes = await call_storage(partial(_hash_images, task.prompt), f"images of task {task.identity}")
    if not hashes:
        return task.content_digest
    text = ":".join([task.content_digest, *sorted(hashes)])
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]


def _hash_images(prompt: Any) -> set[str]:
    """Return the hashes of the images in the messages of a prompt that can be read."""
    parser = MessageParser(read_url=read_environment_url)
    for message in prompt:
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # it is not a chat message
            content = message["content"]
            if isinstance(content, str):
                continue
            for part in [content] if isinstance(content, Media) else content:
                with contextlib.suppress(RamifyError):
                    parser.parse_part(part)
    return set(parser.media)


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One repetition of a task. `task_key` is the task's identity, with `#2` appended for a second equal task."""

    task_key: str
    task: Task
    repetition: int

    @property
    def id(self) -> str:
        """The rollout's id in the run."""
        return make_rollout_id(self.task_key, self.repetition)

    def derive_seed(self, base_seed: int) -> int:
        """Return the rollout's seed: the same on every start, different for every rollout."""
        digest = hashlib.sha256(f"{base_seed}:{self.task_key}:{self.repetition}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


async def load_plan(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    """Return the rollouts of an eval, task by task.

    The tasks are loaded in a thread, so that the timeout also applies to a `load` that blocks. Raises
    DeadlineExceeded, with the stack of `load`, after `timeouts.load` seconds, and ConfigInvalid for a task that cannot
    be run.
    """
    timeout, thread_id = config.timeouts.load, 0

    def load() -> list[PlannedRollout]:
        nonlocal thread_id
        thread_id = threading.get_ident()
        return _plan_rollouts(environment, config)

    operation = f"load of taskset {environment.name}"
    try:
        async with fail_after(timeout, operation):
            return await run_in_hook_thread(load, {})
    except DeadlineExceeded as error:
        stack = format_thread_stack(thread_id)
        message = f"{operation} took longer than {timeout:g} s (timeouts.load); its current stack:\n{stack}"
        raise DeadlineExceeded(message.rstrip()) from error


def _plan_rollouts(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    times_seen: Counter[str] = Counter()
    rollouts: list[PlannedRollout] = []
    for task in load_first_tasks(environment, config.num_tasks):
        environment.check_task(task)
        times_seen[task.identity] += 1
        count = times_seen[task.identity]
        key = task.identity if count == 1 else f"{task.identity}#{count}"
        rollouts += [PlannedRollout(key, task, repetition) for repetition in range(config.repetitions)]
    return rollouts


def load_first_tasks(environment: Environment, count: int) -> list[Task]:
    """Return the first `count` tasks. Raises ConfigInvalid if loading them raises, or if there are none."""
    name = environment.name
    try:
        tasks = list(islice(environment.iter_tasks(), count))
    except RamifyError as error:
        raise ConfigInvalid(f"taskset {name} cannot be loaded: {error.message}") from error
    except Exception as error:  # the environment's code may raise anything
        raise ConfigInvalid(f"taskset {name} cannot be loaded: load raised {describe_exception(error)}") from error
    if not tasks:
        raise ConfigInvalid(f"taskset {name} has no tasks")
    return tasks


def find_missing(rollouts: Sequence[PlannedRollout], rows: Mapping[str, RolloutRecord]) -> list[PlannedRollout]:
    """Return the rollouts that have not run, or that failed because of the system."""
    return [rollout for rollout in rollouts if (row := rows.get(rollout.id)) is None or row.failure is not None]
