"""A task: what is asked, and what a reward needs to judge the answer. Data, never code.

A task travels between processes, names a group in the ledger and is compared on resume. So it is frozen, every value
in it is plain or becomes plain in one known way, and its identity is its content unless it brings a key of its own.
"""

import hashlib
import json
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ramify.trace.plain_data import to_plain

IDENTITY_DIGITS = 16


class Task(BaseModel):
    """One task. Further fields are welcome, as keywords or declared in a subclass."""

    model_config = ConfigDict(frozen=True, extra="allow")

    prompt: str | tuple[dict[str, Any], ...] | None = None
    """The first user message, or the opening messages in OpenAI's form; None where a user speaks first."""
    system: str | None = None
    answer: Any = None
    key: str | None = None
    """The task's identity; without one, a hash of all it holds."""
    image: str | None = None
    """The container image its box is made from, for runtimes that have images."""
    workdir: str | None = None
    """Where in the box programs start."""
    resources: dict[str, float] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0)
    """Seconds the agent has, where that differs from the harness's own limit."""

    @model_validator(mode="before")
    @classmethod
    def _extra_values_must_be_plain(cls, data: Any) -> Any:
        """Values that no field describes are checked here, while whoever set them is still on the stack."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        untyped_fields = {name for name in data if name not in fields or fields[name].annotation is Any}
        return {
            name: to_plain(value, f"task.{name}") if name in untyped_fields else value for name, value in data.items()
        }

    @cached_property
    def identity(self) -> str:
        """What this task is called wherever it is counted."""
        return self.content_digest if self.key is None else self.key

    @cached_property
    def content_digest(self) -> str:
        """A digest of all fields, with or without a key: two tasks with equal content are the same task."""
        return compute_content_digest(self.to_wire())

    def to_wire(self) -> dict[str, Any]:
        """The task as plain data; defaults are left out, so that a field added later changes no identity."""
        return to_plain(self.model_dump(mode="json", exclude_defaults=True), "task")

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """The task again."""
        return cls.model_validate(wire)


def compute_content_digest(wire: dict[str, Any]) -> str:
    """Return the digest of a task's wire form."""
    canonical = json.dumps(wire, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:IDENTITY_DIGITS]
