"""A source, loaded: the taskset with its hooks, the harness, and how a box is made for each rollout.

Everything that can be wrong with a configuration is found here, before anything starts: an unknown plugin or key, a
hook that asks for what nobody provides, a harness that cannot work with this taskset or runtime.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ramify.client.loop_pacer import LoopPacer
from ramify.config import Config
from ramify.env import Task, Taskset, TasksetHooks, collect_hooks, plugin
from ramify.env.code_digest import compute_code_digests
from ramify.errors import ConfigInvalid, RamifyError
from ramify.errors.origin import describe_exception
from ramify.gateway.config import RolloutLimits
from ramify.gateway.policy import ChatPolicy, Policy
from ramify.harness import ExternalModelConfig, Harness
from ramify.rollout.config import SourceConfig
from ramify.runtime import Runtime, RuntimeConfig


@dataclass(slots=True)
class Environment:
    """What all rollouts of a source share."""

    source: SourceConfig
    taskset: Taskset
    hooks: TasksetHooks
    harness: Harness
    runtime_class: type[Runtime]
    runtime_config: RuntimeConfig
    limits: RolloutLimits
    sampling_metadata: dict[str, Any]
    """How its calls are sampled, as traces say it."""
    runtime_metadata: dict[str, Any]
    """What its rollouts run in, as traces say it."""
    start_pacer: LoopPacer = field(default_factory=LoopPacer)
    """Rollouts begin one after the other, however many are asked for at once."""
    _model_policies: dict[str, ChatPolicy] = field(default_factory=dict[str, ChatPolicy])

    @classmethod
    def load(cls, source: SourceConfig, *, keep_sandboxes: bool = False) -> "Environment":
        """The environment a source describes; `keep` leaves the boxes of its rollouts where they are."""
        taskset = _build_plugin("taskset", source.taskset)
        harness = _build_plugin("harness", {"id": "chat", **source.harness})
        box, told = plugin.resolve_plugin(
            "runtime", {"id": "local", **source.runtime, **({"keep": True} if keep_sandboxes else {})}
        )
        config = _require_runtime_config(told)
        env = cls(
            source=source,
            taskset=taskset,
            hooks=collect_hooks(taskset),
            harness=harness,
            runtime_class=box,
            runtime_config=config,
            limits=source.limits,
            sampling_metadata=source.sampling.model_dump(mode="json"),
            runtime_metadata=box(config).identity,
        )
        harness.check(env.hooks, env.make_runtime())
        for name, model in harness.config.models.items():
            _read_api_key(name, model)
        return env

    async def close(self) -> None:
        """End the connections to the models that the harness names."""
        models, self._model_policies = self._model_policies, {}
        for model in models.values():
            await model.close()

    @property
    def name(self) -> str:
        return self.source.name or str(self.source.taskset.get("id", ""))

    @property
    def identity(self) -> dict[str, Any]:
        """What its rollouts depend on besides the model and the task, as plain data: digests of code files, and
        configuration.

        Defaults are left out, so that a key which a later version adds does not change the identity. The defaults of a
        user's plugin are part of its code.
        """
        plugins = (type(self.taskset), type(self.harness), self.runtime_class)
        config = {"taskset": self.taskset.config, "harness": self.harness.config, "sampling": self.source.sampling}
        return {
            "code": {file: digest for cls in plugins for file, digest in compute_code_digests(cls).items()},
            **{name: part.model_dump(mode="json", exclude_defaults=True) for name, part in config.items()},
        }

    @property
    def has_rewards(self) -> bool:
        """Whether a rollout can be scored at all."""
        return bool(self.hooks.rewards or self.hooks.group_rewards)

    @property
    def requires_endpoint(self) -> bool:
        """Whether its code reaches the policy over HTTP, so that a rollout needs a gateway.

        What `tools` and `user` return is not known before a rollout; they get an endpoint if there is a gateway.
        """
        hooks = self.hooks
        named = (hooks.setup, hooks.finalize, hooks.tools, hooks.user)
        hooks_with_context = chain(
            hooks.rewards, hooks.metrics, hooks.stops, (hook for hook in named if hook is not None)
        )
        return (
            self.harness.requires_endpoint
            or any("endpoint" in hook.injected_parameters for hook in hooks_with_context)
            or any("endpoint" in tool.injected_parameters for tool in hooks.static_tools.tools)
        )

    def iter_tasks(self) -> Iterator[Task]:
        """The tasks, in their order. Whatever `load` raises is raised."""
        for index, task in enumerate(self.taskset.load()):
            if not isinstance(task, Task):
                raise ConfigInvalid(f"{self.name}: load gave a {type(task).__qualname__} as task {index}, not a Task")
            yield task

    def check_task(self, task: Task) -> None:
        """Refuse, with ConfigInvalid, a task that this harness or this runtime cannot take."""
        self.make_runtime().check_task(task)
        self.harness.check_task(task, self.hooks)

    def make_runtime(self) -> Runtime:
        """A box that is not started yet."""
        return self.runtime_class(self.runtime_config)

    def open_models(self) -> dict[str, Policy]:
        """The other models that the harness names; all rollouts share their connections."""
        for name, model in self.harness.config.models.items():
            if name not in self._model_policies:
                self._model_policies[name] = ChatPolicy(model.base_url, model.model, _read_api_key(name, model))
        return dict(self._model_policies)


def _build_plugin(kind: str, table: dict[str, Any]) -> Any:
    """A plugin; what its constructor raises is a problem of the configuration."""
    try:
        return plugin.build_plugin(kind, table)
    except RamifyError:
        raise
    except Exception as error:
        raise ConfigInvalid(f"{kind} {table.get('id')} cannot be made: {describe_exception(error)}") from error


def _require_runtime_config(config: Config) -> RuntimeConfig:
    if not isinstance(config, RuntimeConfig):
        raise ConfigInvalid(f"runtime: its config must derive from RuntimeConfig, found {type(config).__qualname__}")
    return config


def _read_api_key(name: str, model: ExternalModelConfig) -> str:
    if model.api_key_env is None:
        return ""
    key = os.environ.get(model.api_key_env)
    if not key:
        raise ConfigInvalid(f"harness.models.{name}.api_key_env: the variable {model.api_key_env} is not set")
    return key
