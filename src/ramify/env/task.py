"""A task: the prompt, and the data that rewards need to score the answer. A task contains data, never code.

Tasks are sent between processes, name groups in the ledger and are compared on resume. So a task is frozen, all its
values are plain data or are converted to plain data in one defined way, and its identity is a digest of its content
unless it has a `key`.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePath
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ramify.core.config.schema import is_dict, is_list, is_tuple
from ramify.core.errors import OperationInvalid
from ramify.infer.dialects.media import MEDIA_ADVICE, media_to_url
from ramify.trace import Media
from ramify.trace.plain_data import to_plain


def to_plain_prompt(prompt: Any) -> Any:
    """Return a prompt whose messages have parts of plain data. Raises OperationInvalid, which names the part."""
    if not is_list(prompt) and not is_tuple(prompt):
        return prompt
    return tuple(_to_plain_message(message, f"task.prompt[{index}]") for index, message in enumerate(prompt))


def _to_plain_message(message: Any, key: str) -> Any:
    if not is_dict(message):
        return message
    content = message.get("content")
    if isinstance(content, Media):
        content = [content]
    if not is_list(content) and not is_tuple(content):
        return message
    return {
        **message,
        "content": [_to_plain_part(part, f"{key}.content[{index}]") for index, part in enumerate(content)],
    }


def _to_plain_part(part: Any, key: str) -> Any:
    if isinstance(part, Media):
        return {"type": "image_url", "image_url": {"url": media_to_url(part)}}
    try:
        return to_plain(part, key)
    except OperationInvalid as error:
        raise OperationInvalid(f"{error.message}; {MEDIA_ADVICE} as the part") from error


IDENTITY_DIGITS = 16


class Task(BaseModel):
    """One task. It may have further fields, given as keywords or declared in a subclass.

    - `prompt`: the first user message, or the initial messages in OpenAI's format. None: a user speaks first. A part
      that is a `Media` is converted to a data URL.
    - `system`: the system message.
    - `answer`: whatever rewards need to score a reply; it is not shown to the agent.
    - `key`: the task's identity. None: a digest of all fields.
    - `image`: the container image of the sandbox, for runtimes that support images.
    - `workdir`: the directory in which programs start, relative to the rollout's work directory.
    - `setup`: shell command lines that prepare both runtimes of the task, the agent's and the one for the rewards.
    - `pre_run`: shell command lines that run right before the agent starts, in its runtime only.
    - `resources`: limits on memory, processes, disk and cores; see `ResourceLimits`.
    - `requires`: what the runtime must enforce or support, such as "isolation"; see `Capability`.
    - `outputs`: paths in the work directory, or "." for all of it. If given, rewards and metrics get a fresh runtime,
      which holds only these files and directories of the agent's.
    - `timeout`: seconds that the agent has for this task; it replaces `harness.timeout`.
    - `scoring_timeout`: seconds for the rewards and metrics of this task together; it replaces `timeouts.scoring`.
    - `resource_source_keys`: set in a subclass; by resource, the key of a file that it was read from, for messages.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    resource_source_keys: ClassVar[Mapping[str, str]] = {}

    prompt: str | tuple[dict[str, Any], ...] | None = None
    system: str | None = None
    answer: Any = None
    key: str | None = None
    image: str | None = None
    workdir: str | None = None
    setup: tuple[str, ...] = ()
    pre_run: tuple[str, ...] = ()
    resources: dict[str, float] = Field(default_factory=dict)
    requires: tuple[Literal["isolation", "private_network"], ...] = ()
    outputs: tuple[str, ...] | None = None
    timeout: float | None = Field(default=None, gt=0)
    scoring_timeout: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _extra_values_must_be_plain(cls, data: Any) -> Any:
        """Check values without a typed field at construction, so that the error points to the code that set them."""
        if not is_dict(data):
            return data
        fields = cls.model_fields
        untyped_fields = {name for name in data if name not in fields or fields[name].annotation is Any}
        return {
            name: to_plain(value, f"task.{name}") if name in untyped_fields else value for name, value in data.items()
        }

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_parts_must_be_plain(cls, prompt: Any) -> Any:
        """Convert images to data URLs, and check parts at construction, for the same reason."""
        return to_plain_prompt(prompt)

    @field_validator("outputs")
    @classmethod
    def _outputs_are_relative(cls, outputs: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for path in outputs or ():
            is_empty = not PurePath(path).parts and path != "."
            if PurePath(path).is_absolute() or ".." in PurePath(path).parts or is_empty:
                raise ValueError(f"{path!r} is not a path in the work directory")
        return outputs

    @cached_property
    def identity(self) -> str:
        """The name of the task in traces, groups and the ledger: its key, or else its content digest."""
        return self.content_digest if self.key is None else self.key

    @cached_property
    def content_digest(self) -> str:
        """The digest of all fields, the key included. Tasks with equal digests are the same task."""
        return compute_content_digest(self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        """Return the task as plain data, without defaults, so that a field added later does not change identities.

        The result is computed once and shared; do not change it.
        """
        return self._wire

    @cached_property
    def _wire(self) -> dict[str, Any]:
        return to_plain(self.model_dump(mode="json", exclude_defaults=True), "task")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, and with an identity of its own."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("identity", "content_digest", "_wire"):
            vars(copy).pop(name, None)
        return copy

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """Return the task that `to_wire` converted."""
        return cls.model_validate(wire)


def compute_content_digest(wire: dict[str, Any]) -> str:
    """Return the digest of a task's wire form."""
    canonical = json.dumps(wire, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:IDENTITY_DIGITS]
