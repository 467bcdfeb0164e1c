"""Rollouts as people read them: one row for each branch of the trace, with its messages in order."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ramify.env.task import compute_content_digest
from ramify.run.store.image_labels import elide_data_urls, format_content, label_images
from ramify.run.store.image_store import ImageStore
from ramify.trace import Message, Trace

COLUMNS = ("source", "task", "task_data", "rollout", "branch", "reward", "advantage", "messages")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One branch of a rollout."""

    source: str
    task: str
    """The identity of the task."""
    task_data: str
    """The task itself, as JSON; images are labels."""
    rollout: str
    """The id of the rollout."""
    branch: int
    reward: float | None
    advantage: float | None
    messages: tuple[tuple[str, str], ...]
    """(role, text) in order."""

    @property
    def row(self) -> tuple[str, str, str, str, int, float | None, float | None, str]:
        """The values of COLUMNS."""
        scores = (self.reward, self.advantage)
        return (self.source, self.task, self.task_data, self.rollout, self.branch, *scores, self.text)

    @property
    def text(self) -> str:
        """The conversation as one text."""
        return "\n".join(f"[{role}] {text}" for role, text in self.messages)


def build_samples(
    trace: Trace, *, source: str, advantage: float | None = None, images: ImageStore | None = None
) -> list[RolloutSample]:
    """Return one sample for each branch of a rollout; `images` is the image store of its run."""
    image_labels = label_images(trace, images)
    task = str(trace.task.get("key") or compute_content_digest(trace.task)) if trace.task else ""
    task_data = json.dumps(elide_data_urls(trace.task), ensure_ascii=False, default=str)
    return [
        RolloutSample(
            source=source,
            task=task,
            task_data=task_data,
            rollout=trace.id,
            branch=index,
            reward=trace.reward,
            advantage=advantage,
            messages=tuple((message.role, _format_message(message, image_labels)) for message in branch.messages),
        )
        for index, branch in enumerate(trace.branches)
    ]


def _format_message(message: Message, image_labels: Mapping[str, str]) -> str:
    parts = [f"[reasoning] {message.reasoning}"] if message.reasoning else []
    parts.append(format_content(message, image_labels))
    parts += [f"[tool call] {call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join(part for part in parts if part)
