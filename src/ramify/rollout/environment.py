"""A loaded source: the taskset with its hooks, the harness, and the runtime class with its config.

Loading detects all configuration errors before anything starts: an unknown plugin or key, a hook with an unknown
parameter, a harness that cannot work with the taskset or the runtime.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

from ramify.core.errors import ConfigInvalid, EnvironmentFault, ImageInvalid, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env import Runtime, RuntimeConfig, Task, Taskset, TasksetHooks, collect_hooks, plugin
from ramify.env.chat_client import read_api_key
from ramify.env.code_digest import compute_code_digests
from ramify.infer.client.http_client import LoopPacer
from ramify.infer.gateway.config import RolloutLimits
from ramify.infer.gateway.policy import ChatPolicy, Policy
from ramify.model.images import decode_image
from ramify.model.render.prompt_images import check_image_count, find_image_parts
from ramify.processes.interpreter import find_other_interpreter
from ramify.rollout.config import SourceConfig
from ramify.rollout.harness import Harness
from ramify.rollout.harness.base import build_initial_messages
from ramify.rollout.harness.program import ProgramHarnessConfig
from ramify.rollout.prepared_runtimes import PreparedRuntimes
from ramify.rollout.runtime.bwrap import describe_fallback
from ramify.rollout.runtime.config import SandboxRuntimeConfig
from ramify.rollout.runtime.sandbox import SandboxRuntime
from ramify.rollout.runtime.template import SandboxTemplate


def check_prompt_images(task: Task) -> bool:
    """Return whether the prompt of a task has images. Raises EnvironmentFault if one of them cannot be used."""
    messages, images = build_initial_messages(task)
    try:
        check_image_count(len(find_image_parts(messages)))
        for image in images.values():
            decode_image(image.data)
    except ImageInvalid as error:
        raise EnvironmentFault(f"task.prompt of task {task.identity} cannot be used: {error.message}") from error
    return bool(images)


PLACEMENT_KEYS = {
    "keep_workdir",
    "num_prepared",
    "workdir_root",
    "engine",
    "engine_host",
    "gateway_url",
    "pull",
    "lifetime",
    "start_timeout",
    "labels",
    "max_starts_per_second",
}  # keys of runtimes that say where and when programs run; rollouts do not depend on them


@dataclass(slots=True)
class Environment:
    """Everything that all rollouts of a source share."""

    source: SourceConfig
    taskset: Taskset
    hooks: TasksetHooks
    harness: Harness
    limits: RolloutLimits
    sampling_metadata: dict[str, Any]
    """The sampling parameters, in the form that traces store."""
    runtime_metadata: dict[str, Any]
    """The description of the runtime, in the form that traces store."""
    idle_runtime: Runtime
    """A runtime that never starts; it checks tasks."""
    prepared_runtimes: PreparedRuntimes
    """The runtimes that are prepared for the next rollouts."""
    sandbox_template: SandboxTemplate | None = None
    """Has imported the packages of the agent; sandboxes are its forks."""
    start_pacer: LoopPacer = field(default_factory=LoopPacer)
    """Lets one rollout start per event-loop iteration, so that a burst of requests does not block heartbeats."""
    _model_policies: dict[str, ChatPolicy] = field(default_factory=dict[str, ChatPolicy])

    @classmethod
    def load(cls, source: SourceConfig, *, key: str = "") -> "Environment":
        """Return the environment described by a source.

        `key` is the key of the source in its configuration, for messages about its tables.
        """
        if (python := find_other_interpreter(source.python)) is not None:
            raise ConfigInvalid(f"this process runs {sys.executable}; run it with {python} -m ramify", key="python")
        harness_table = {"id": "chat", **source.harness}
        runtime_table = {"id": "local", **source.runtime}
        tables = {"taskset": source.taskset, "harness": harness_table, "runtime": runtime_table}
        *_, runtime = plugin.resolve_plugins(
            [(kind, f"{key}.{kind}".removeprefix("."), table) for kind, table in tables.items()]
        )
        runtime_class: type[Runtime]
        runtime_class, runtime_config = runtime
        if describe_fallback(runtime_table):
            common_keys = RuntimeConfig.model_fields.keys() & runtime_table.keys()
            local_table = {**{key: runtime_table[key] for key in common_keys}, "id": "local"}
            runtime_class, runtime_config = plugin.resolve_plugin("runtime", local_table)
        taskset: Taskset = _build_plugin("taskset", source.taskset)
        hooks = collect_hooks(taskset)
        if hooks.run_agent is not None and harness_table["id"] == "chat":
            harness_table["id"] = "taskset"
        harness: Harness = _build_plugin("harness", harness_table)
        if not isinstance(runtime_config, RuntimeConfig):
            config_type = type(runtime_config).__qualname__
            raise ConfigInvalid(f"its config must derive from RuntimeConfig, found {config_type}", key="runtime")
        idle_runtime: Runtime = runtime_class(runtime_config)
        template = _build_template(harness, str(runtime_table["id"]), runtime_config)

        def make_runtime() -> Runtime:
            if template is not None:
                return SandboxRuntime(template.config, template)
            return runtime_class(runtime_config)

        env = cls(
            source=source,
            taskset=taskset,
            hooks=hooks,
            harness=harness,
            limits=source.limits,
            sampling_metadata=source.sampling.model_dump(mode="json"),
            runtime_metadata=idle_runtime.trace_metadata,
            idle_runtime=idle_runtime,
            prepared_runtimes=PreparedRuntimes(make_runtime, runtime_config.num_prepared),
            sandbox_template=template,
        )
        env.idle_runtime.check_task(Task())
        harness.check_compatibility(env.hooks, env.idle_runtime)
        harness.check_limits(env.limits)
        for name, model in harness.config.models.items():
            read_api_key(model.api_key_env, f"harness.models.{name}.api_key_env")
        return env

    async def close(self) -> None:
        """Close the connections to the models that the harness config names, and stop the prepared runtimes."""
        await self.prepared_runtimes.close()
        if self.sandbox_template is not None:
            await self.sandbox_template.close()
        models, self._model_policies = self._model_policies, {}
        for model in models.values():
            await model.close()

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.source_name

    @property
    def identity(self) -> dict[str, Any]:
        """Everything its rollouts depend on besides the model and the task: digests of code files, and configuration.

        It is plain data without defaults, so that a key added by a later version does not change the identity. The
        defaults of a user's plugin are part of its code. Keys of the runtime that say where its programs run, but not
        what they can do, are left out.
        """
        plugins, runtime_config = (self.taskset, self.harness, self.idle_runtime), self.idle_runtime.config
        config = {"taskset": self.taskset.config, "harness": self.harness.config, "sampling": self.source.sampling}
        return {
            "code": {file: digest for part in plugins for file, digest in compute_code_digests(type(part)).items()},
            **{name: part.model_dump(mode="json", exclude_defaults=True) for name, part in config.items()},
            "runtime": {
                "id": runtime_config.id,
                **runtime_config.model_dump(mode="json", exclude_defaults=True, exclude=PLACEMENT_KEYS),
            },
        }

    @property
    def has_rewards(self) -> bool:
        """Whether the taskset has any rewards."""
        return bool(self.hooks.rewards or self.hooks.group_rewards)

    @property
    def requires_endpoint(self) -> bool:
        """Whether the harness, a hook or a tool calls the policy over HTTP, so that a rollout needs a gateway.

        What the hooks `tools` and `user` return is not known before a rollout; it gets the endpoint of a gateway if
        there is one.
        """
        hooks = self.hooks
        named = (hooks.setup, hooks.finalize, hooks.tools, hooks.user, hooks.run_agent)
        functions = chain[Any](hooks.rewards, hooks.metrics, hooks.stops, filter(None, named), hooks.static_tools.tools)
        return self.harness.requires_endpoint or any(
            "endpoint" in function.injected_parameters for function in functions
        )

    def iter_tasks(self) -> Iterator[Task]:
        """Yield the tasks in order. Errors of the taskset's `load` are raised unchanged."""
        tasks = cast(Iterable[object], self.taskset.load())
        for index, task in enumerate(tasks):
            if not isinstance(task, Task):
                task_type = type(task).__qualname__
                raise ConfigInvalid(f"{self.name}: task {index} of load is a {task_type}, expected a Task")
            yield task

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if the harness or the runtime cannot run the task."""
        self.idle_runtime.check_task(task)
        self.harness.check_task(task, self.hooks)

    def open_models(self) -> dict[str, Policy]:
        """Return the other models that the harness config names. All rollouts share their connections."""
        for name, model in self.harness.config.models.items():
            if name not in self._model_policies:
                key = read_api_key(model.api_key_env, f"harness.models.{name}.api_key_env")
                self._model_policies[name] = ChatPolicy(*model.resolve(), key, retries=self.source.model_retries)
        return dict(self._model_policies)

    def update_model_addresses(self) -> None:
        """Use the current addresses of the other models, after a model of the run has moved."""
        for name, policy in self._model_policies.items():
            policy.set_base_url(self.harness.config.models[name].resolve()[0])


def _build_template(harness: Harness, runtime_id: str, runtime_config: RuntimeConfig) -> SandboxTemplate | None:
    """Return the template of the source's sandboxes if its harness asks for one."""
    preload = harness.config.build_preload() if isinstance(harness.config, ProgramHarnessConfig) else None
    if preload is None:
        return None
    if runtime_id != "sandbox":
        raise ConfigInvalid(f"it needs the runtime 'sandbox', not {runtime_id!r}", key="harness.preload")
    if not isinstance(runtime_config, SandboxRuntimeConfig):
        return None  # a sandbox does not work on this machine, and the source falls back to the runtime `local`
    return SandboxTemplate(runtime_config, preload)


def _build_plugin(kind: str, table: dict[str, Any]) -> Any:
    """Return a plugin. Errors of its constructor are raised as ConfigInvalid."""
    try:
        return plugin.build_plugin(kind, table)
    except RamifyError:
        raise
    except Exception as error:
        raise ConfigInvalid(f"{kind} {table.get('id')} cannot be created: {describe_exception(error)}") from error
