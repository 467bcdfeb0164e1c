"""verifiers: an environment of verifiers, of either generation, unmodified.

The environment runs its own loop. Its model calls go to the rollout's endpoint, so the trace has every sampled token.
Its rewards and metrics become rewards and metrics by name. Each of several agents has a trace of its own.
"""

import importlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.adapters import import_package
from ramify.env.adapters.verifiers.environment import FinishedRollout, VerifiersEnvironment, add_reward_hooks

MAX_CACHED_GROUPS = 256  # whose scores are kept until all hooks have read them
STATE_KEY = "verifiers"  # in the `info` of a trace
NOT_TRAINABLE = "the environment does not allow to train this agent"


class VerifiersConfig(rf.TasksetConfig):
    """The environment and its arguments."""

    env: str
    """The id of the environment, as verifiers names it; its package must be installed."""
    args: dict[str, Any] = {}
    """v0: the arguments of `load_environment`. v1: the keys of the taskset."""
    agent: dict[str, Any] = {}
    """v1 only: the keys of its agents, such as `harness` and `runtime`."""
    env_options: dict[str, Any] = {}
    """v1 only: other keys of the environment, such as `n` of `best-of-n`; `id`, an environment to combine with the
    taskset `env`; and keys of one of several agents, by its name."""
    seed: int = 0
    """Seeds Python's random numbers while the environment is loaded; a rollout is seeded by its task and attempt."""


class Verifiers(rf.Taskset):
    """The tasks of an environment of verifiers, which runs and scores its own rollouts."""

    config: VerifiersConfig

    def __init__(self, config: VerifiersConfig, environment: VerifiersEnvironment | None = None) -> None:
        super().__init__(config)
        random.seed(config.seed)
        self._environment = environment or _load_environment(config)
        self._group_scores: OrderedDict[tuple[str, ...], list[dict[str, float]]] = OrderedDict()
        add_reward_hooks(self, self._environment.weights, from_group=self._environment.scores_groups)

    def load(self) -> Iterator[rf.Task]:
        """Yield the tasks of the split, or of the only split that the environment has."""
        return self._environment.iter_tasks(self.config.split)

    async def run_agent(
        self,
        task: rf.Task,
        trace: rf.Trace,
        endpoint: rf.Endpoint,
        add_agent: Callable[[str], rf.RolloutAgent],
        rng: random.Random,
        state: SimpleNamespace,
    ) -> str:
        """Let the environment run its loop, and keep the scores and the state of each agent."""
        random.seed(rng.getrandbits(64))
        names = self._environment.agents
        agents = [rf.RolloutAgent(trace, endpoint)] if len(names) == 1 else [add_agent(name) for name in names]
        results = await self._environment.run(task, agents)
        state.scores = {}
        for agent, finished in zip(agents, results, strict=True):
            self._store_result(agent.trace, finished, state)
            if len(agents) > 1:
                agent.trace.stop = finished.stop
        return results[0].stop

    def _store_result(self, trace: rf.Trace, finished: FinishedRollout, state: SimpleNamespace) -> None:
        if finished.scores is not None:
            state.scores[trace.agent] = dict(finished.scores)
        trace.metrics.update(finished.metrics)
        trace.info[STATE_KEY] = {"generation": self._environment.generation, "state": finished.state}
        if self._environment.ignored_sampling:
            trace.info[STATE_KEY] |= {"ignored_sampling": dict(self._environment.ignored_sampling)}
        for node in () if finished.is_trainable else trace.sampled_nodes:
            trace.exclude_from_training(node, NOT_TRAINABLE)

    async def score_traces(self, traces: list[rf.Trace]) -> list[dict[str, float]]:
        """Return the scores of all attempts at a task by the environment's group rewards.

        The hooks of all rewards of a group call this one after another; the environment scores the group once.
        """
        key = tuple(trace.id for trace in traces)
        if key not in self._group_scores:
            scores = await self._score_group(traces)
            self._group_scores[key] = scores
            while len(self._group_scores) > MAX_CACHED_GROUPS:
                self._group_scores.popitem(last=False)
        return self._group_scores[key]

    async def _score_group(self, traces: list[rf.Trace]) -> list[dict[str, float]]:
        if missing := [trace.id for trace in traces if STATE_KEY not in trace.info]:
            raise EnvironmentFault(f"{missing[0]} has no state of verifiers, so its group cannot be scored")
        tasks = [self.task_type.from_wire(trace.task) for trace in traces]
        return await self._environment.score_group(tasks, [trace.info[STATE_KEY]["state"] for trace in traces])


def _load_environment(config: VerifiersConfig) -> VerifiersEnvironment:
    """Load the environment with the adapter of its generation: a module with `load_environment` is of v0."""
    import_package("verifiers", "verifiers", "verifiers")
    name = config.env.rpartition("/")[2].partition("@")[0].replace("-", "_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigInvalid(f"{name} imports {error.name}, which is not installed", key="taskset.env") from error
        module = None  # v1 has environments of its own
    if hasattr(module, "load_environment"):
        if config.agent or config.env_options:
            key = "agent" if config.agent else "env_options"
            raise ConfigInvalid(
                f"{config.env} is an environment of v0, which has no {key}; remove it", key=f"taskset.{key}"
            )
        from ramify.env.adapters.verifiers.v0 import V0Environment

        return V0Environment(config.env, config.args)
    from ramify.env.adapters.verifiers.v1 import V1Environment

    return V1Environment(config.env, config.args, config.agent, config.env_options)
