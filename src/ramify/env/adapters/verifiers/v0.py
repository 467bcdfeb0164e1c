"""Environments of verifiers up to 0.3, which have `load_environment`, a dataset and a rubric.

A rubric turns an exception of a reward function into the score 0.0. Its functions are therefore wrapped: an exception
is noted before the rubric sees it, and the rollout fails with EnvironmentFault instead of being scored 0.
"""

import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env.adapters import import_package
from ramify.env.adapters.conversation import find_policy_refusal
from ramify.env.adapters.verifiers.environment import (
    TOTAL,
    FinishedRollout,
    VerifiersEnvironment,
    keep_plain_fields,
    to_plain_row,
)

DEFAULT_SAMPLING = ("n", "extra_body")  # what verifiers sets without being asked
# Kept for group rewards; the rest of a state is objects of the loop.
STATE_FIELDS = ("completion", "is_truncated", "stop_condition")
LOOP_FIELDS = {
    *("input", "task", "prompt", "answer", "info", "example_id", "client", "model", "sampling_args", "tool_defs"),
    *("trajectory", "trajectory_id", "final_env_response", "timing", "usage", "usage_tracker", "is_completed"),
    *("reward", "advantage", "metrics", "error", *STATE_FIELDS),
}

_noted_errors: ContextVar[list[tuple[str, Exception]]] = ContextVar("noted_errors")


class V0Task(rf.Task):
    """A row of the environment's dataset; its prompt is the task's."""

    row: dict[str, Any]


class V0Environment(VerifiersEnvironment):
    """An environment that `load_environment` returns."""

    generation = "v0"

    def __init__(self, env_id: str, args: dict[str, Any]) -> None:
        self._vf: Any = _import_v0()
        try:
            self._env: Any = self._vf.load_environment(env_id, **args)
        except (ValueError, RuntimeError) as error:
            raise ConfigInvalid(f"{env_id} cannot be loaded in {sys.prefix}: {error}", key="taskset.env") from error
        rubrics = _list_rubrics(self._env.rubric)
        for rubric in rubrics:
            rubric.funcs = [_note_errors(function) for function in rubric.funcs]
        self.weights = _find_weights(rubrics, self._vf)
        self.scores_groups = bool(self._env.requires_group_rollouts)
        self.ignored_sampling = {
            name: value for name, value in self._env.sampling_args.items() if name not in DEFAULT_SAMPLING
        }

    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        """Yield the rows of the dataset; of the other one if the environment has only one."""
        get_dataset = self._env.get_eval_dataset if split == "eval" else self._env.get_dataset
        try:
            dataset = get_dataset()
        except ValueError:  # it has no dataset to train on
            dataset = self._env.get_eval_dataset()
        for row in dataset:
            fields = to_plain_row(row)
            prompt = fields.pop("prompt")
            yield V0Task(prompt=prompt if isinstance(prompt, str) else tuple(prompt), row=fields)

    async def run(self, task: rf.Task, agents: Sequence[rf.RolloutAgent]) -> list[FinishedRollout]:
        """Run the environment's `rollout` and its rubric."""
        (agent,) = agents
        endpoint, trace = agent.endpoint, agent.trace
        async with self._open_client(endpoint) as client:
            state = await self._env.rollout(self._build_input(task), client, endpoint.model, {})
        stop = self._find_stop(state, trace)
        plain_state = _get_plain_state(state)
        if self.scores_groups:
            return [FinishedRollout(stop, state=plain_state)]
        with _raise_noted_errors():
            await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return [FinishedRollout(stop, self._get_scores(state), state=plain_state)]

    async def score_group(self, tasks: list[rf.Task], states: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Score states that are built again from plain data, all attempts at one task together."""
        rebuilt = [await self._rebuild_state(task, state) for task, state in zip(tasks, states, strict=True)]
        with _raise_noted_errors():
            await self._env.rubric.score_group(rebuilt)
        for state in rebuilt:
            await self._env.rubric.cleanup(state)
        return [self._get_scores(state) for state in rebuilt]

    def _get_scores(self, state: Any) -> dict[str, float]:
        scores = {TOTAL: state["reward"]} if TOTAL in self.weights and len(self.weights) == 1 else state["metrics"]
        return {name: float(scores[name]) for name in self.weights}

    def _build_input(self, task: rf.Task) -> dict[str, Any]:
        prompt = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt or ()]
        return {**cast(V0Task, task).row, "prompt": prompt}

    async def _rebuild_state(self, task: rf.Task, plain_state: dict[str, Any]) -> Any:
        client = self._vf.OpenAIChatCompletionsClient(None)  # a group reward makes no model calls
        state = await self._env.init_state(self._build_input(task), client, "", {})
        state.update(plain_state)
        normalize: Any = import_package("verifiers.utils.message_utils", "verifiers", "verifiers-v0")
        state["completion"] = normalize.maybe_normalize_messages(plain_state["completion"], field_name="completion")
        return state

    def _find_stop(self, state: Any, trace: rf.Trace) -> str:
        """Return the stop reason. Raises what is wrong with the environment or the engine, if that ended the rollout.

        A reply that verifiers cannot use, and a limit that is reached, are the policy's: the rollout is scored.
        """
        error = state.get("error")
        if error is None:
            return str(state.get("stop_condition") or "done")
        if not isinstance(error, self._vf.ModelError):
            raise EnvironmentFault(f"{self._env.env_id}: {_describe(error)}") from error
        return find_policy_refusal(trace) or type(error).__name__

    @contextlib.asynccontextmanager
    async def _open_client(self, endpoint: rf.Endpoint) -> AsyncGenerator[Any]:
        openai: Any = import_package("openai", "openai", "verifiers-v0")
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            yield self._vf.OpenAIChatCompletionsClient(client)


def _import_v0() -> Any:
    """Import verifiers. Raises ConfigInvalid if its version has no environments of v0."""
    verifiers: Any = import_package("verifiers", "verifiers", "verifiers-v0")
    try:
        if callable(verifiers.load_environment):
            return verifiers
    except (AttributeError, ImportError):
        pass
    version = getattr(verifiers, "__version__", "unknown")
    raise ConfigInvalid(
        f"taskset.env: the environment is of v0, which verifiers {version} does not run; expected a version before "
        "0.4: `ramify venv install verifiers-v0`"
    )


def _list_rubrics(rubric: Any) -> list[Any]:
    """Return a rubric, or those in a group of rubrics."""
    members = getattr(rubric, "rubrics", None)
    return [rubric] if members is None else [inner for member in members for inner in _list_rubrics(member)]


def _find_weights(rubrics: list[Any], vf: Any) -> dict[str, float]:
    """Return the weights by name; one weight of 1 for the total if names repeat or a rubric scores in its own way."""
    pairs = [pair for rubric in rubrics for pair in zip(rubric.funcs, rubric.weights, strict=True)]
    names = [getattr(function, "__name__", repr(function)) for function, _ in pairs]
    has_own_way = any(
        getattr(cast(Any, type(rubric)), name) is not getattr(vf.Rubric, name)
        for rubric in rubrics
        for name in ("score_rollout", "score_group")
    )
    if has_own_way or max(Counter(names).values(), default=2) > 1:
        return {TOTAL: 1.0}
    return {name: float(weight) for name, (_, weight) in zip(names, pairs, strict=True)}


def _note_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes exceptions of the given one. It has the same signature, which rubrics inspect."""

    async def wait_for(result: Any, name: str) -> Any:
        try:
            return await result
        except Exception as error:
            _noted_errors.get([]).append((name, error))
            raise

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", repr(function))
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            _noted_errors.get([]).append((name, error))
            raise
        return wait_for(result, name) if inspect.isawaitable(result) else result

    return call


@contextlib.contextmanager
def _raise_noted_errors() -> Generator[None]:
    """Raise EnvironmentFault if a reward function raised in the block, although the rubric scored it 0."""
    noted: list[tuple[str, Exception]] = []
    token = _noted_errors.set(noted)
    try:
        yield
    finally:
        _noted_errors.reset(token)
    if noted:
        name, error = noted[0]
        if isinstance(error, RamifyError):
            raise error
        raise EnvironmentFault(f"{name}: {describe_exception(error)}") from error


def _get_plain_state(state: Any) -> dict[str, Any]:
    """Return the fields of a state that are plain data: what the environment added, and the completion."""
    fields = {name: value for name, value in state.items() if name not in LOOP_FIELDS or name in STATE_FIELDS}
    return keep_plain_fields(fields)


def _describe(error: BaseException) -> str:
    cause = error.__cause__
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if cause is None else f"{text} ({type(cause).__name__}: {cause})"
