"""Rollouts as people read them: one row for each branch of the trace, with its messages in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from ramify.env.task import compute_content_digest
from ramify.images import ImageStore, format_content, label_images
from ramify.trace import Message, Trace

COLUMNS = ("source", "task", "rollout", "branch", "reward", "advantage", "messages")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One branch of a rollout."""

    source: str
    task: str
    """The identity of the task."""
    rollout: str
    """The id of the rollout."""
    branch: int
    reward: float | None
    advantage: float | None
    messages: tuple[tuple[str, str], ...]
    """(role, text) in order."""

    @property
    def row(self) -> tuple[str, str, str, int, float | None, float | None, str]:
        """The values of COLUMNS."""
        return (self.source, self.task, self.rollout, self.branch, self.reward, self.advantage, self.text)

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
    return [
        RolloutSample(
            source=source,
            task=task,
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
