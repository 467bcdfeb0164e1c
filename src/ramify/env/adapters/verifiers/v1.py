"""Environments of verifiers from 0.4 on: a taskset whose tasks score themselves, and agents with harnesses.

Verifiers' own client forwards each call of a harness to the endpoint of its agent. Every rollout has its own `Env`
object, because an `Env` holds the servers of one rollout at a time. A plain taskset names its rewards. An environment
with a class of its own adds rewards while it runs, so its one reward here is the total, and the parts are metrics.
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.adapters import import_package
from ramify.env.adapters.conversation import find_policy_refusal
from ramify.env.adapters.verifiers.environment import TOTAL, FinishedRollout, VerifiersEnvironment, keep_plain_fields

LOCAL_RUNTIME = {"type": "subprocess"}  # of the agent, instead of a remote sandbox
UNUSED_KEY_VARIABLE = "RAMIFY_NO_API_KEY"  # the rollout's key is in a header


class V1Task(rf.Task):
    """A task of the taskset, by its position."""

    index: int


class V1Environment(VerifiersEnvironment):
    """A taskset of v1, and the environment that lets agents work on its tasks."""

    generation = "v1"

    def __init__(self, env_id: str, args: dict[str, Any], agent: dict[str, Any], options: dict[str, Any]) -> None:
        self._vf: Any = import_package("verifiers.v1", "verifiers", "verifiers")
        loaders: Any = import_package("verifiers.v1.utils.loaders", "verifiers", "verifiers")
        configs: Any = import_package("verifiers.v1.configs.agent", "verifiers", "verifiers")
        table = {**options, "taskset": {**args, "id": env_id}}
        try:
            names = configs.agent_config_fields(loaders.resolve_env_config(table))
            overrides = {name: {"runtime": LOCAL_RUNTIME, **agent, **options.get(name, {})} for name in names}
            self._config: Any = loaders.resolve_env_config({**table, **overrides})
            self._env_class: Any = loaders.environment_class(env_id, options.get("id", ""))
            self._tasks = _LazyTasks(iter(self._env_class(self._config).taskset))
        except (ImportError, TypeError, ValueError) as error:  # a pydantic error is a ValueError
            raise ConfigInvalid(f"{env_id} cannot be loaded in {sys.prefix}: {error}", key="taskset.env") from error
        self._names_rewards = self._env_class is loaders.SingleAgentEnv
        self.weights = _find_weights(self._tasks.get(0)) if self._names_rewards else {TOTAL: 1.0}
        self.agents = find_policy_agents(env_id, configs.agent_config_fields(self._config))
        self.ignored_sampling = agent.get("sampling", {})
        _add_interpreter_to_path()

    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        """Yield the tasks of the taskset, which has no splits; `args` may select one."""
        index = 0
        while (task := self._tasks.get(index)) is not None:
            prompt, system = _get_prompt(task.data)
            yield V1Task(prompt=prompt, system=system, key=task.key, index=index)
            index += 1

    async def run(self, task: rf.Task, agents: Sequence[rf.RolloutAgent]) -> list[FinishedRollout]:
        """Run one episode of the environment, which scores itself."""
        vf_task = self._tasks.get(cast(V1Task, task).index)
        if vf_task is None:
            raise EnvironmentFault(f"the taskset has no task {task.identity}")
        clients = {name: _make_client(agent.endpoint) for name, agent in zip(self.agents, agents, strict=True)}
        env = self._env_class(_set_clients(self._config, clients))
        async with env.serving():
            episode = await env.run_episode(vf_task, self._make_context(agents[0].endpoint, clients[self.agents[0]]))
        if not episode.traces:
            raise EnvironmentFault(_describe_errors(episode.errors))
        vf_traces: list[Any] = list(episode.traces)
        refusals = [None if episode.ok else find_policy_refusal(agent.trace) for agent in agents]
        if not episode.ok and not any(refusals):
            errors = [error for vf_trace in vf_traces for error in vf_trace.errors]
            raise EnvironmentFault(_describe_errors([*errors, *episode.errors]))
        if not episode.ok and self._names_rewards:
            for vf_trace in vf_traces:
                await vf_task.score(vf_trace)  # verifiers does not score a rollout whose model call failed
        return [
            self._build_result([vf_trace for vf_trace in vf_traces if vf_trace.agent.name == name], refusal)
            for name, refusal in zip(self.agents, refusals, strict=True)
        ]

    def _build_result(self, vf_traces: list[Any], refusal: str | None) -> FinishedRollout:
        """Return the result of one agent, from the traces of all its runs."""
        scores = average_scores(vf_traces)
        if not self._names_rewards:
            metrics, scores = scores, {TOTAL: _mean([vf_trace.reward for vf_trace in vf_traces])}
        else:
            metrics, scores = {}, {name: scores[name] for name in self.weights if name in scores}
        last = vf_traces[-1] if vf_traces else None
        return FinishedRollout(
            refusal or str((last and last.stop_condition) or "done"),
            scores,
            metrics,
            keep_plain_fields(last.info) if last else {},
            is_trainable=all(vf_trace.agent.trainable for vf_trace in vf_traces),
        )

    def _make_context(self, endpoint: rf.Endpoint, client: Any) -> Any:
        clients: Any = import_package("verifiers.v1.clients", "verifiers", "verifiers")
        return clients.ModelContext(model=endpoint.model, client=client)


def find_policy_agents(env_id: str, agents: Mapping[str, Any]) -> list[str]:
    """Return the names of the agents that the policy plays: those without a client of their own.

    Raises ConfigInvalid if there are none.
    """
    names = [name for name, agent in agents.items() if agent.client is None]
    if not names:
        raise ConfigInvalid(f"every agent of {env_id} has a client of its own; expected one without", key="taskset.env")
    return names


def average_scores(vf_traces: list[Any]) -> dict[str, float]:
    """Return the rewards and metrics of an agent by name.

    Some environments run an agent several times in an episode, which is one rollout here: each score is the mean.
    """
    values: dict[str, list[float]] = {}
    for vf_trace in vf_traces:
        scores = {name: reward.score for name, reward in vf_trace.rewards.items() if reward is not None}
        scores |= {name: value for name, value in vf_trace.metrics.items() if value is not None}
        for name, score in scores.items():
            values.setdefault(name, []).append(float(score))
    return {name: _mean(numbers) for name, numbers in values.items()}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _make_client(endpoint: rf.Endpoint) -> Any:
    configs: Any = import_package("verifiers.v1.configs.client", "verifiers", "verifiers")
    headers = {"x-api-key": endpoint.api_key}
    return configs.EvalClientConfig(base_url=endpoint.base_url, api_key_var=UNUSED_KEY_VARIABLE, headers=headers)


def _set_clients(config: Any, clients: Mapping[str, Any]) -> Any:
    """Return the configuration of an environment with these clients of its agents."""
    agents = {name: getattr(config, name).model_copy(update={"client": client}) for name, client in clients.items()}
    return config.model_copy(update=agents)


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
