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

FILLER_TEXT = "word"
CALL_ID = "call00000"  # nine letters and digits: the only form that every template accepts
SYSTEM_ROLES = ("system", "developer")


class MessageKind(NamedTuple):
    """What a template may look at in a message, besides what it says."""

    role: str
    has_content: bool = True
    reasoning: str | None = None  # none, an empty thought, or the filler
    num_calls: int = 0

    @classmethod
    def from_message(cls, message: Message) -> MessageKind:
        thought = FILLER_TEXT if message.reasoning else message.reasoning
        spoken = bool(message.text) or message.role != "assistant" or not (thought is not None or message.tool_calls)
        return cls(message.role, spoken, thought, min(len(message.tool_calls), 2))

    def example(self) -> list[Message]:
        """A message of this kind, with the tool results it asks for."""
        ids = [CALL_ID[:-1] + str(number) for number in range(self.num_calls)]
        calls = tuple(ToolCall(id, FILLER_TEXT, f'{{"{FILLER_TEXT}": "{FILLER_TEXT}"}}') for id in ids)
        message = Message(self.role, FILLER_TEXT if self.has_content else "", self.reasoning, calls)
        return [message, *(Message("tool", FILLER_TEXT, tool_call_id=id) for id in ids)]


def without_text(message: Message) -> Message:
    """The message without its texts; ids and names of calls stay, because tool results refer to them."""
    kind = MessageKind.from_message(message)
    calls = tuple(ToolCall(call.id, call.name, f'{{"{FILLER_TEXT}": "{FILLER_TEXT}"}}') for call in message.tool_calls)
    return Message(message.role, FILLER_TEXT if kind.has_content else "", kind.reasoning, calls, message.tool_call_id)


@dataclass(frozen=True, slots=True)
class ConversationOutline:
    """An abridged conversation. It grows by one message at a time and stays small."""

    system: tuple[Message, ...] = ()
    earlier_kinds: tuple[MessageKind, ...] = ()
    turn_start: tuple[Message, ...] = ()
    current_kinds: tuple[MessageKind, ...] = ()
    since_last_reply: tuple[Message, ...] = ()

    @classmethod
    def from_messages(cls, messages: Iterable[Message]) -> ConversationOutline:
        outline = cls()
        for message in messages:
            outline = outline.add(message)
        return outline

    def add(self, message: Message) -> ConversationOutline:
        """The outline of the conversation with one more message."""
        short = without_text(message)
        if message.role == "assistant":
            return ConversationOutline(
                self.system, self.earlier_kinds, self.turn_start, self._finished_kinds(), (short,)
            )
        if message.role == "tool" and self.since_last_reply:
            return ConversationOutline(
                self.system, self.earlier_kinds, self.turn_start, self.current_kinds, (*self.since_last_reply, short)
            )
        if message.role in SYSTEM_ROLES and not (self.earlier_kinds or self.turn_start or self.since_last_reply):
            return ConversationOutline((*self.system, short), current_kinds=self.current_kinds)
        if not self.since_last_reply:
            return ConversationOutline(self.system, self.earlier_kinds, (*self.turn_start, short), self.current_kinds)
        earlier = tuple(dict.fromkeys((*self.earlier_kinds, *self._finished_kinds())))
        return ConversationOutline(self.system, earlier, (short,))

    def example_messages(self) -> list[Message]:
        """A short conversation of the same shape, ending in the same message."""
        earlier = [message for kind in self.earlier_kinds for message in _example_turn(kind)]
        steps = [message for kind in self.current_kinds for message in kind.example()]
        conversation = [*self.system, *earlier, *self.turn_start, *steps, *self.since_last_reply]
        # No two alike: a template may look for a message by comparing it with others.
        return [replace(m, content=f"{FILLER_TEXT} {i}") if m.content else m for i, m in enumerate(conversation)]

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Equal for conversations that a template cannot tell apart."""
        return (
            message_kinds(self.system),
            self.earlier_kinds,
            message_kinds(self.turn_start),
            self.current_kinds,
            message_kinds(self.since_last_reply),
        )

    def _finished_kinds(self) -> tuple[MessageKind, ...]:
        done = [MessageKind.from_message(message) for message in self.since_last_reply if message.role == "assistant"]
        return tuple(dict.fromkeys((*self.current_kinds, *done)))


def message_kinds(messages: Sequence[Message]) -> tuple[MessageKind, ...]:
    return tuple(map(MessageKind.from_message, messages))


def _example_turn(kind: MessageKind) -> list[Message]:
    """A finished turn that shows this kind: a question, the message, and an answer where the message only calls."""
    answer = [Message("assistant", FILLER_TEXT)] if kind.num_calls else []
    return [Message("user", FILLER_TEXT), *kind.example(), *answer]
