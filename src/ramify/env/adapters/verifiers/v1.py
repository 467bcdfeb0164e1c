"""Environments of verifiers from 0.4 on: a taskset whose tasks score themselves, and an agent with a harness.

Verifiers' own client forwards each call of the harness to the rollout's endpoint. Every rollout has its own `Env`
object, because an `Env` holds the servers of one rollout at a time.
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.adapters.refusals import find_policy_refusal, import_package
from ramify.env.adapters.verifiers.environment import FinishedRollout, VerifiersEnvironment, keep_plain_fields

LOCAL_RUNTIME = {"type": "subprocess"}  # of the agent, instead of a remote sandbox
UNUSED_KEY_VARIABLE = "RAMIFY_NO_API_KEY"  # the rollout's key is in a header


class V1Task(rf.Task):
    """A task of the taskset, by its position."""

    index: int


class V1Environment(VerifiersEnvironment):
    """A taskset of v1 with one agent."""

    generation = "v1"

    def __init__(self, env_id: str, args: dict[str, Any], agent: dict[str, Any]) -> None:
        self._vf: Any = import_package("verifiers.v1", "verifiers", "verifiers")
        loaders: Any = import_package("verifiers.v1.utils.loaders", "verifiers", "verifiers")
        agents: Any = import_package("verifiers.v1.configs.agent", "verifiers", "verifiers")
        table = {"taskset": {**args, "id": env_id}}
        try:
            role = get_only_agent(env_id, list(agents.agent_config_fields(loaders.resolve_env_config(table))))
            self._config: Any = loaders.resolve_env_config({**table, role: {"runtime": LOCAL_RUNTIME, **agent}})
            self._env_class: Any = loaders.environment_class(env_id, "")
            self._tasks = _LazyTasks(iter(self._env_class(self._config).taskset))
        except (ImportError, TypeError, ValueError) as error:  # a pydantic error is a ValueError
            raise ConfigInvalid(f"{env_id} cannot be loaded in {sys.prefix}: {error}", key="taskset.env") from error
        self.weights = _find_weights(self._tasks.get(0))
        self.ignored_sampling = agent.get("sampling", {})
        _add_interpreter_to_path()

    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        """Yield the tasks of the taskset, which has no splits; `args` may select one."""
        index = 0
        while (task := self._tasks.get(index)) is not None:
            prompt, system = _get_prompt(task.data)
            yield V1Task(prompt=prompt, system=system, key=task.key, index=index)
            index += 1

    async def run(self, task: rf.Task, endpoint: rf.Endpoint, trace: rf.Trace) -> FinishedRollout:
        """Run one episode of the environment, which scores itself."""
        vf_task = self._tasks.get(cast(V1Task, task).index)
        if vf_task is None:
            raise EnvironmentFault(f"the taskset has no task {task.identity}")
        env = self._env_class(self._config)
        async with env.serving():
            episode = await env.run_episode(vf_task, self._make_context(endpoint))
        if not episode.traces:
            raise EnvironmentFault(_describe_errors(episode.errors))
        vf_traces: list[Any] = list(episode.traces)
        stop = str(vf_traces[-1].stop_condition or "done")
        if not episode.ok:
            refusal = find_policy_refusal(trace)
            if refusal is None:
                errors = [error for vf_trace in vf_traces for error in vf_trace.errors]
                raise EnvironmentFault(_describe_errors([*errors, *episode.errors]))
            stop = refusal
            for vf_trace in vf_traces:
                await vf_task.score(vf_trace)  # verifiers does not score a rollout whose model call failed
        return FinishedRollout(stop, average_scores(vf_traces, self.weights), keep_plain_fields(vf_traces[-1].info))

    def _make_context(self, endpoint: rf.Endpoint) -> Any:
        clients: Any = import_package("verifiers.v1.clients", "verifiers", "verifiers")
        configs: Any = import_package("verifiers.v1.configs.client", "verifiers", "verifiers")
        client = configs.EvalClientConfig(
            base_url=endpoint.base_url, api_key_var=UNUSED_KEY_VARIABLE, headers={"x-api-key": endpoint.api_key}
        )
        return clients.ModelContext(model=endpoint.model, client=client)


def get_only_agent(env_id: str, roles: list[str]) -> str:
    """Return the name of an environment's agent, which the policy plays. Raises ConfigInvalid unless it has one."""
    if len(roles) != 1:
        agents = f"the agents {', '.join(roles)}" if roles else "no agent"
        raise ConfigInvalid(
            f"taskset.env: {env_id} has {agents}; expected one, because a rollout trains one policy on one reward"
        )
    return roles[0]


def average_scores(vf_traces: list[Any], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards and metrics of an episode by name.

    Some environments run their agent several times in an episode, which is one rollout here: each score is the mean.
    """
    values: dict[str, list[float]] = {}
    for vf_trace in vf_traces:
        scores = {name: reward.score for name, reward in vf_trace.rewards.items() if reward is not None}
        scores |= {name: value for name, value in vf_trace.metrics.items() if value is not None}
        for name in weights:
            if name in scores:
                values.setdefault(name, []).append(float(scores[name]))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


class _LazyTasks:
    """The tasks of a taskset by index. They are read from the taskset when they are first needed."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._source, self._read, self._lock = tasks, list[Any](), threading.Lock()

    def get(self, index: int) -> Any:
        """Return a task; None if there are fewer."""
        with self._lock:
            while len(self._read) <= index:
                task = next(self._source, None)
                if task is None:
                    return None
                self._read.append(task)
            return self._read[index]


def _find_weights(task: Any) -> dict[str, float]:
    """Return the weights of a task's rewards and judges, and 0 for its metrics. Raises ConfigInvalid without a task."""
    if task is None:
        raise ConfigInvalid("the taskset has no tasks", key="taskset.env")
    weights = {reward.__name__: float(getattr(reward, "_vf_weight", 1.0)) for reward in task.hooks("reward")}
    weights |= {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}
    return {metric.__name__: 0.0 for metric in task.hooks("metric")} | weights


def _get_prompt(data: Any) -> tuple[Any, str | None]:
    """Return the prompt of a task, by which its conversation is recognized, and its system prompt."""
    if data.prompt is None or isinstance(data.prompt, str):
        return data.prompt, data.system_prompt
    messages = (message.model_dump(mode="json", exclude_none=True) for message in data.prompt)
    return tuple(messages), data.system_prompt


def _add_interpreter_to_path() -> None:
    """Make `uv`, with which verifiers starts its harnesses, available if it is installed beside this interpreter."""
    directory = str(Path(sys.executable).parent)
    if shutil.which("uv") is None and shutil.which("uv", path=directory) is not None:
        os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', '')}"


def _describe_errors(errors: list[Any]) -> str:
    if not errors:
        return "the episode of verifiers failed without an error"
    return f"{errors[-1].type}: {errors[-1].message}"
