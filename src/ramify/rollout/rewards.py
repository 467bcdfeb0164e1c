"""Scoring: run the rewards and metrics of a rollout. A reward that fails stays None and does not affect the others.

A missing reward is never 0: a policy must not be trained on failures of its environment. Whoever asked for an attempt
repeats it after a system failure; env servers do not.

The `state` that hooks share is saved as text, so that rewards can be computed again later. A reward may compare types
(`state.position == (1, 2)`), so a state is saved exactly or not at all: values, lists, tuples, sets and dicts keep
their types. Other objects are refused, since loading them would run code that may have changed.
"""

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, cast

from ramify.core.async_calls import fail_after
from ramify.core.config.schema import is_list
from ramify.core.errors import EnvironmentFault, Failure, OperationInvalid, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env import Hook, RolloutContext, Task
from ramify.env.hook import is_current_task_cancelled
from ramify.rollout.environment import Environment
from ramify.trace import Trace
from ramify.trace.header import TURN_REWARDS_KEY
from ramify.trace.plain_data import MAX_DEPTH, to_plain

REWARD_MISSING = Failure("EnvironmentFault", "a reward did not run", "system", True)
SCORING_STATE_KEY = "scoring_state"  # the key in the `info` of a trace: {"saved": text} or {"refused": reason}
MAX_STATE_SIZE = 1_000_000  # characters and values of a saved state
_SEQUENCE_TYPES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


async def repeat_attempt(run: Callable[[], Awaitable[Sequence[Trace]]], env: Environment) -> Sequence[Trace]:
    """Call `run`, which runs one attempt, until it ends without a system failure, at most `max_tries` times.

    Returns the traces of the last try; `trace.info["tries"]` lists the failures of the tries before it.
    """
    failures: list[str] = []
    while True:
        traces = await run()
        failure = next(filter(None, (find_system_failure(env, trace) for trace in traces)), None)
        if failure is None or not failure.retryable or len(failures) + 1 >= env.source.max_tries:
            break
        failures.append(f"{failure.name}: {failure.message}")
    if failures:
        for trace in traces:
            trace.info["tries"] = failures
    return traces


def find_system_failure(env: Environment, trace: Trace) -> Failure | None:
    """Return why a trace says nothing about the policy (a system failure, or a reward that did not run), or None.

    Group rewards do not count: they are computed later.
    """
    failure = next((error for error in trace.errors if error.blame == "system"), None)
    if failure is None and any(trace.rewards.get(hook.name) is None for hook in env.hooks.rewards):
        return REWARD_MISSING
    return failure


def save_state(state: SimpleNamespace) -> str:
    """Return the state as text. Raises OperationInvalid, which names the attribute that cannot be saved."""
    tagger = _Tagger()
    tagged = {name: tagger.tag(value, f"state.{name}") for name, value in vars(state).items()}
    try:
        return json.dumps(tagged)
    except ValueError as error:  # an int with more digits than Python converts
        raise OperationInvalid(f"state: {error}") from error


def load_state(text: str) -> SimpleNamespace:
    """Return the state that `save_state` saved."""
    return SimpleNamespace(**{name: _untag(value) for name, value in json.loads(text).items()})


class _Tagger:
    """Converts values to JSON: containers to [type, content], bytes to base64. Refuses more than `MAX_STATE_SIZE`."""

    def __init__(self) -> None:
        self._size = 0

    def tag(self, value: Any, location: str, depth: int = 0) -> Any:
        if depth == MAX_DEPTH:
            raise OperationInvalid(f"{location} is nested more than {MAX_DEPTH} deep")
        kind = cast(type[Any], type(value))  # not isinstance: an instance of a subclass may have further attributes
        self._size += 1 + (len(value) if kind in (str, bytes) else 0)
        if self._size > MAX_STATE_SIZE:
            raise OperationInvalid(f"state is larger than {MAX_STATE_SIZE:,} characters")
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]
        if kind is dict:
            items = [
                (self.tag(key, location, depth + 1), self.tag(value[key], f"{location}[{key!r}]", depth + 1))
                for key in value
            ]
            return ["dict", items]
        if kind in _SEQUENCE_TYPES.values():
            return [kind.__name__, [self.tag(item, f"{location}[{i}]", depth + 1) for i, item in enumerate(value)]]
        raise OperationInvalid(
            f"{location} is a {kind.__qualname__}, and only values, lists, tuples, sets and dicts are saved"
        )


def _untag(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = cast(list[Any], value)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dict":
        return {_untag(key): _untag(item) for key, item in content}
    return _SEQUENCE_TYPES[kind](map(_untag, content))


class raise_environment_faults:  # noqa: N801 - used like a function; a class is faster than a generator
    """Raises errors of the block as EnvironmentFault; `what` names the code that runs in it.

    A RamifyError, and the cancellation of the current task itself, pass unchanged. KeyboardInterrupt is an error of the
    code too: at Ctrl-C, asyncio cancels the main task instead of raising it.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError) and not is_current_task_cancelled():
            raise EnvironmentFault(f"{self._what}: CancelledError: something it awaited was cancelled") from error
        if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)) and not isinstance(error, RamifyError):
            raise EnvironmentFault(f"{self._what}: {describe_exception(error)}") from error


def build_unscored_rewards(env: Environment) -> dict[str, Any]:
    """Return the names of all rewards, each with the value None."""
    return {hook.name: None for hook in (*env.hooks.rewards, *env.hooks.group_rewards)}


async def score_trace(env: Environment, context: RolloutContext, *, with_metrics: bool = True) -> None:
    """Run the rewards and metrics of one rollout. Failures are added to the trace and not raised."""
    trace = context.trace
    with _record_failures([trace]):
        async with fail_after(context.task.scoring_timeout or env.source.timeouts.scoring, "scoring"):
            for hook in env.hooks.rewards:
                with _record_failures([trace]), raise_environment_faults(hook.name):
                    value = await hook(context)
                    if hook.name in env.hooks.turn_reward_names:
                        value = _record_turn_rewards(hook, value, trace)
                    trace.rewards[hook.name] = (value, hook.weight)
            for hook in env.hooks.metrics if with_metrics else ():
                with _record_failures([trace]), raise_environment_faults(hook.name):
                    trace.metrics[hook.name] = await hook(context)


def _record_turn_rewards(hook: Hook, values: Any, trace: Trace) -> float:
    """Store the rewards of the turns in the trace's info, and return their sum."""
    expected = f"{hook.name}: expected a number or None for each of {trace.num_turns} turns"
    if not is_list(values):
        raise EnvironmentFault(f"{expected}, got a {type(values).__qualname__}")
    if len(values) != trace.num_turns:
        raise EnvironmentFault(f"{expected}, got {len(values)} values")
    scores = [None if value is None else float(value) for value in values]
    trace.info[TURN_REWARDS_KEY] = {**trace.info.get(TURN_REWARDS_KEY, {}), hook.name: scores}
    return sum(score for score in scores if score is not None)


async def score_group(env: Environment, task: Task, traces: Sequence[Trace]) -> None:
    """Run the group rewards of all attempts at a task. A failure is added to every trace and not raised."""
    if not traces:
        return
    context = RolloutContext(task, traces[0], rng=random.Random(f"{traces[0].group}:{task.identity}"))
    for hook in env.hooks.group_rewards:
        with _record_failures(traces):
            async with fail_after(env.source.timeouts.scoring, f"the group reward {hook.name}"):
                with raise_environment_faults(hook.name):
                    values = await hook(context, traces=list(traces))
                _set_group_rewards(hook, values, traces)
    for trace in traces:
        drop_unserializable_info(trace)


def drop_unserializable_info(trace: Trace) -> None:
    """Remove info values that cannot be serialized: a list in `trace.info` may have changed after it was checked."""
    for key in list(trace.info):
        try:
            to_plain(trace.info[key], f"info.{key}")
        except OperationInvalid as error:
            del trace.info[key]
            trace.errors.append(Failure.from_exception(error))


def _set_group_rewards(hook: Hook, values: Any, traces: Sequence[Trace]) -> None:
    try:
        scores = list(values)
    except TypeError:
        raise EnvironmentFault(
            f"{hook.name}: expected one number for each trace, found a {type(values).__qualname__}"
        ) from None
    if len(scores) != len(traces):
        raise EnvironmentFault(f"{hook.name}: {len(scores)} scores for {len(traces)} traces")
    previous_rewards = [trace.rewards.get(hook.name) for trace in traces]
    try:
        for trace, value in zip(traces, scores):
            trace.rewards[hook.name] = (value, hook.weight)
    except OperationInvalid:
        for trace, reward in zip(traces, previous_rewards):
            trace.rewards[hook.name] = reward
        raise


@contextlib.contextmanager
def _record_failures(traces: Sequence[Trace]) -> Generator[None]:
    """Add an error of the block to the traces instead of raising it."""
    try:
        yield
    except RamifyError as error:
        for trace in traces:
            trace.errors.append(Failure.from_exception(error))
