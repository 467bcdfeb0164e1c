"""A conversation reduced to what a chat template can react to, so that turn 160 is as short as turn 3.

A template looks at the start of a conversation (system prompt, tools), at the last user turn, at the neighbours of a
message, and at which *kinds* of messages there are (one with reasoning, one with tool calls). How many of each there
are does not matter to it. So an outline keeps the system prompt, one sample of each kind of earlier turn, the opening
of the current turn, one sample of each kind of its finished steps, and everything since the last reply:

    system | user, assistant | user | assistant + call, tool | assistant + call, tool, tool
    head   | earlier         |opening| steps                  | recent

Texts are replaced by a filler word. A template rendered on the outline plus the new messages writes behind the last
message what it would write on the whole conversation, and rewrites the outline where it would rewrite the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from ramify.trace import Message, ToolCall

FILLER = "word"
CALL_ID = "call00000"  # nine letters and digits: the only form that every template accepts
SYSTEM_ROLES = ("system", "developer")


class Kind(NamedTuple):
    """What a template may look at in a message, besides what it says."""

    role: str
    content: bool = True
    reasoning: str | None = None  # none, an empty thought, or the filler
    calls: int = 0

    @classmethod
    def of(cls, message: Message) -> Kind:
        thought = FILLER if message.reasoning else message.reasoning
        spoken = bool(message.text) or message.role != "assistant" or not (thought is not None or message.tool_calls)
        return cls(message.role, spoken, thought, min(len(message.tool_calls), 2))

    def sample(self) -> list[Message]:
        """A message of this kind, with the tool results it asks for."""
        ids = [CALL_ID[:-1] + str(number) for number in range(self.calls)]
        calls = tuple(ToolCall(id, FILLER, f'{{"{FILLER}": "{FILLER}"}}') for id in ids)
        message = Message(self.role, FILLER if self.content else "", self.reasoning, calls)
        return [message, *(Message("tool", FILLER, tool_call_id=id) for id in ids)]


def stub(message: Message) -> Message:
    """The message without its texts; ids and names of calls stay, because tool results refer to them."""
    kind = Kind.of(message)
    calls = tuple(ToolCall(call.id, call.name, f'{{"{FILLER}": "{FILLER}"}}') for call in message.tool_calls)
    return Message(message.role, FILLER if kind.content else "", kind.reasoning, calls, message.tool_call_id)


@dataclass(frozen=True, slots=True)
class Outline:
    """An abridged conversation. It grows by one message at a time and stays small."""

    head: tuple[Message, ...] = ()
    earlier: tuple[Kind, ...] = ()
    opening: tuple[Message, ...] = ()
    steps: tuple[Kind, ...] = ()
    recent: tuple[Message, ...] = ()

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Outline:
        outline = cls()
        for message in messages:
            outline = outline.add(message)
        return outline

    def add(self, message: Message) -> Outline:
        """The outline of the conversation with one more message."""
        short = stub(message)
        if message.role == "assistant":
            return Outline(self.head, self.earlier, self.opening, self._finished_steps(), (short,))
        if message.role == "tool" and self.recent:
            return Outline(self.head, self.earlier, self.opening, self.steps, (*self.recent, short))
        if message.role in SYSTEM_ROLES and not (self.earlier or self.opening or self.recent):
            return Outline((*self.head, short), steps=self.steps)
        if not self.recent:
            return Outline(self.head, self.earlier, (*self.opening, short), self.steps)
        earlier = tuple(dict.fromkeys((*self.earlier, *self._finished_steps())))
        return Outline(self.head, earlier, (short,))

    def messages(self) -> list[Message]:
        """A short conversation of the same shape, ending in the same message."""
        earlier = [message for kind in self.earlier for message in _turn(kind)]
        steps = [message for kind in self.steps for message in kind.sample()]
        conversation = [*self.head, *earlier, *self.opening, *steps, *self.recent]
        # No two alike: a template may look for a message by comparing it with others.
        return [replace(m, content=f"{FILLER} {i}") if m.content else m for i, m in enumerate(conversation)]

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for conversations that a template cannot tell apart."""
        return (kinds(self.head), self.earlier, kinds(self.opening), self.steps, kinds(self.recent))

    def _finished_steps(self) -> tuple[Kind, ...]:
        done = [Kind.of(message) for message in self.recent if message.role == "assistant"]
        return tuple(dict.fromkeys((*self.steps, *done)))


def kinds(messages: Sequence[Message]) -> tuple[Kind, ...]:
    return tuple(map(Kind.of, messages))


def _turn(kind: Kind) -> list[Message]:
    """A finished turn that shows this kind: a question, the message, and an answer where the message only calls."""
    answer = [Message("assistant", FILLER)] if kind.calls else []
    return [Message("user", FILLER), *kind.sample(), *answer]
