"""Configuration of a source of rollouts: the environment, the sampling parameters and the limits of an attempt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, model_validator

from ramify.core.config import Config, get_explicit_values
from ramify.core.config.base import merge_tables
from ramify.core.config.schema import KeyPath, has_key_path, is_dict, is_list
from ramify.core.names import find_duplicates
from ramify.infer.gateway.config import AGENT_TIMEOUT, RolloutLimits, SamplingConfig

S = TypeVar("S", bound="SourceConfig")


class TimeoutsConfig(Config):
    """Time limits of the phases of a rollout; `harness.timeout` limits the agent itself."""

    load: float = Field(default=300.0, gt=0)
    """Seconds for the taskset's `load` to return the requested tasks."""
    boot: float = Field(default=120.0, gt=0)
    """Seconds for the runtime to start."""
    setup: float = Field(default=120.0, gt=0)
    """Seconds for the hooks `setup`, `tools` and `user`."""
    finalize: float = Field(default=120.0, gt=0)
    """Seconds for the hook `finalize`."""
    scoring: float = Field(default=300.0, gt=0)
    """Seconds for all rewards and metrics together; `task.scoring_timeout` replaces it."""
    engine_stall: float = Field(default=600.0, gt=0)
    """Seconds that one rollout may wait in total for an engine that makes no progress, before it fails with
    ProviderError. These waits do not count towards `harness.timeout`."""


class SourceConfig(Config):
    """An environment and how its rollouts are run."""

    misplaced_keys: ClassVar = {"num_tasks": "taskset.num_tasks", "split": "taskset.split"}

    name: str = ""
    """Name of the source, unique in the run; by default the taskset's id, or the name of its file without `.py`."""
    taskset: dict[str, Any]
    """The taskset's `id` and its options."""
    harness: dict[str, Any] = {"id": "chat"}
    """The harness's `id` and its options."""
    runtime: dict[str, Any] = {"id": "local"}
    """The runtime's `id` and its options."""
    python: str | None = None
    """The interpreter in which the environment runs: a path, or the name of a virtual environment
    made by `ramify venv install`. Default: this one."""
    sampling: SamplingConfig = SamplingConfig()
    max_turns: int | None = Field(default=None, ge=1)
    """Maximum model calls of one rollout."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one rollout that were not sampled, such as prompts and tool results."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Maximum sampled tokens of one rollout."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Maximum input and output tokens of one rollout together."""
    seq_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of one conversation: a path from the root of a trace to a leaf."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    max_tries: int = Field(default=3, ge=1)
    """Maximum tries of a rollout that fails because of the system, not the agent."""
    model_retries: int = Field(default=5, ge=0)
    """How often a model call is sent again after a transient failure."""

    def max_attempt_seconds(self, task_timeout: float | None = None) -> float:
        """Return the seconds that one attempt may take: all phases, and the waits for a stalled engine.

        `task_timeout` is the task's own timeout, which replaces the harness's.
        """
        timeouts = self.timeouts
        agent = task_timeout or float(self.harness.get("timeout", AGENT_TIMEOUT))
        return timeouts.boot + timeouts.setup + agent + timeouts.engine_stall + timeouts.finalize + timeouts.scoring

    @property
    def source_name(self) -> str:
        """The name of the source: `name`, or else the taskset's id, for a file without its directory and `.py`."""
        file, separator, class_name = str(self.taskset.get("id", "")).partition(":")
        return self.name or (Path(file).stem if file.endswith(".py") else file) + separator + class_name

    @property
    def limits(self) -> RolloutLimits:
        """The limits on turns and tokens of one rollout."""
        return RolloutLimits(**{name: getattr(self, name) for name in RolloutLimits.model_fields})


SHARED_TABLES = ("sampling", "harness", "runtime")


class SharedSourceSettings(Config):
    """The tables `[sampling]`, `[harness]` and `[runtime]` of a configuration with several sources.

    Every source inherits them and overrides them key by key. A source with another harness or runtime than the shared
    one inherits nothing of it.
    """

    source_kinds: ClassVar[Sequence[str]] = ("train", "eval")

    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of all sources."""
    harness: dict[str, Any] = {}
    """The harness of all sources. Its `id` and options."""
    runtime: dict[str, Any] = {}
    """The runtime of all sources. Its `id` and options."""

    @model_validator(mode="before")
    @classmethod
    def _sources_inherit(cls, data: Any) -> Any:
        if not is_dict(data):
            return data
        shared = {key: _dump_shared_table(key, data.get(key)) for key in SHARED_TABLES}
        inherited = {key: table for key, table in shared.items() if table}
        sources: dict[str, Any] = {key: data[key] for key in cls.source_kinds if is_list(data.get(key))}
        return {**data, **{key: [_inherit(source, inherited) for source in value] for key, value in sources.items()}}

    @classmethod
    def find_given_key(cls, key: KeyPath, data: Any) -> KeyPath:
        """Return the key in a shared table for a value that a source inherits from there."""
        if len(key) > 3 and key[0] in cls.source_kinds and key[2] in SHARED_TABLES and has_key_path(data, key[:2]):
            source, shared = data[key[0]][key[1]], data.get(key[2])
            own = source.get(key[2], {}) if is_dict(source) else None
            is_inherited = is_dict(own) and is_dict(shared) and _inherits(own, shared)
            if is_inherited and has_key_path(shared, key[3:]) and not has_key_path(own, key[3:]):
                return key[2:]
        return super().find_given_key(key, data)


def _dump_shared_table(key: str, table: Any) -> dict[str, Any]:
    """Return the keys of a shared table that are set; none if it is invalid, which is reported only once, for it."""
    if isinstance(table, SamplingConfig):
        return table.model_dump(exclude_unset=True)
    return table if is_dict(table) and (key != "sampling" or _is_valid_sampling(table)) else {}


def _is_valid_sampling(table: dict[str, Any]) -> bool:
    try:
        SamplingConfig.model_validate(table)
    except ValidationError:
        return False
    return True


def _inherits(own: dict[str, Any], shared: dict[str, Any]) -> bool:
    return "id" not in own or own["id"] == shared.get("id", own["id"])


def _inherit(source: Any, shared: dict[str, dict[str, Any]]) -> Any:
    """Return the table of a source with the shared keys that it does not set."""
    if isinstance(source, SourceConfig) and shared:
        source = get_explicit_values(source)
    if not is_dict(source):
        return source
    inherited: dict[str, Any] = {}
    for key, table in shared.items():
        own = source.get(key, {})
        if isinstance(own, SamplingConfig):
            own = own.model_dump(exclude_unset=True)
        if is_dict(own) and _inherits(own, table):
            inherited[key] = merge_tables(table, own)
    return {**source, **inherited}


def check_source_names(sources: list[S]) -> list[S]:
    """Return the sources. Raises ValueError if two of them have the same name."""
    if duplicates := find_duplicates(source.source_name for source in sources):
        raise ValueError(f"two sources are named {duplicates[0]!r}; set a unique `name` for each")
    return sources
