"""Rollouts as people read them: one row for each branch of the trace, with its messages in order."""

from collections.abc import Mapping
from dataclasses import dataclass

from ramify.trace import MediaPart, Message, Trace

COLUMNS = ("source", "rollout", "branch", "reward", "advantage", "messages")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One branch of a rollout."""

    source: str
    rollout: str
    """The id of the rollout."""
    branch: int
    reward: float | None
    advantage: float | None
    messages: tuple[tuple[str, str], ...]
    """(role, text) in order."""

    @property
    def row(self) -> tuple[str, str, int, float | None, float | None, str]:
        """The values of COLUMNS."""
        return (self.source, self.rollout, self.branch, self.reward, self.advantage, self.text)

    @property
    def text(self) -> str:
        """The conversation as one text."""
        return "\n".join(f"[{role}] {text}" for role, text in self.messages)


def build_samples(trace: Trace, *, source: str, advantage: float | None = None) -> list[RolloutSample]:
    """Return one sample for each branch of a rollout; media are shown as their type and size."""
    media_labels = {media.hash: f"[{media.mime}, {len(media.data):,} bytes]" for media in trace.graph.media}
    return [
        RolloutSample(
            source=source,
            rollout=trace.id,
            branch=index,
            reward=trace.reward,
            advantage=advantage,
            messages=tuple((message.role, _format_message(message, media_labels)) for message in branch.messages),
        )
        for index, branch in enumerate(trace.branches)
    ]


def _format_message(message: Message, media_labels: Mapping[str, str]) -> str:
    parts = [f"[reasoning] {message.reasoning}"] if message.reasoning else []
    if isinstance(message.content, str):
        parts.append(message.content)
    else:
        parts.append(
            "".join(
                media_labels.get(part.hash, "[media]") if isinstance(part, MediaPart) else part.text
                for part in message.content
            )
        )
    parts += [f"[tool call] {call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join(part for part in parts if part)
