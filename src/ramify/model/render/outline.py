"""A conversation reduced to what a chat template can depend on, so that turn 160 is as short as turn 3.

A template depends on the start of a conversation (system prompt, tools), on the last user turn, on the neighbours of a
message, and on which *kinds* of messages exist (one with reasoning, one with tool calls), but not on their number. So
an outline keeps the system prompt, one example of each kind of reply in earlier turns, the start of the current turn,
one example of each kind of its finished replies, and all messages since the last reply:

    system | user, assistant | user       | assistant + call, tool | assistant + call, tool, tool
    system | earlier_kinds   | turn_start | current_kinds          | since_last_reply

Texts are replaced by a filler word. For the outline plus new messages, a template writes the same text after the last
message as for the whole conversation, and rewrites the outline if it would rewrite the whole conversation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ramify.trace import Message, ToolCall

FILLER_TEXT = "word"
CALL_ID = "call00000"  # nine letters and digits, the only form that every template accepts
SYSTEM_ROLES = ("system", "developer")


class MessageKind(NamedTuple):
    """The properties of a message, besides its texts, that a template may depend on."""

    role: str
    has_content: bool = True
    reasoning: str | None = None  # None, "" or the filler
    num_calls: int = 0

    @classmethod
    def from_message(cls, message: Message) -> "MessageKind":
        """Return the kind of a message."""
        reasoning = FILLER_TEXT if message.reasoning else message.reasoning
        has_content = (
            bool(message.text) or message.role != "assistant" or not (reasoning is not None or message.tool_calls)
        )
        return cls(message.role, has_content, reasoning, min(len(message.tool_calls), 2))

    def example(self) -> list[Message]:
        """Return an example message of this kind, followed by the results of its tool calls."""
        call_ids = [CALL_ID[:-1] + str(index) for index in range(self.num_calls)]
        calls = tuple(ToolCall(call_id, FILLER_TEXT, f'{{"{FILLER_TEXT}": "{FILLER_TEXT}"}}') for call_id in call_ids)
        message = Message(self.role, FILLER_TEXT if self.has_content else "", self.reasoning, calls)
        return [message, *(Message("tool", FILLER_TEXT, tool_call_id=call_id) for call_id in call_ids)]


def without_text(message: Message) -> Message:
    """Return the message with filler texts; ids and names of calls stay, because tool results refer to them."""
    kind = MessageKind.from_message(message)
    calls = tuple(ToolCall(call.id, call.name, f'{{"{FILLER_TEXT}": "{FILLER_TEXT}"}}') for call in message.tool_calls)
    return Message(message.role, FILLER_TEXT if kind.has_content else "", kind.reasoning, calls, message.tool_call_id)


class ConversationOutline(Struct, frozen=True):
    """A short conversation that a template treats like the real one. See the module docstring for its parts."""

    system: tuple[Message, ...] = ()
    earlier_kinds: tuple[MessageKind, ...] = ()
    turn_start: tuple[Message, ...] = ()
    current_kinds: tuple[MessageKind, ...] = ()
    since_last_reply: tuple[Message, ...] = ()

    def extend(self, messages: Iterable[Message]) -> "ConversationOutline":
        """Return the outline of the conversation with more messages."""
        outline = self
        for message in messages:
            outline = outline.add(message)
        return outline

    def add(self, message: Message) -> "ConversationOutline":
        """Return the outline of the conversation with one more message."""
        textless = without_text(message)
        if message.role == "assistant":
            return replace(self, current_kinds=self._finished_kinds(), since_last_reply=(textless,))
        if message.role == "tool" and self.since_last_reply:
            return replace(self, since_last_reply=(*self.since_last_reply, textless))
        if message.role in SYSTEM_ROLES and not (self.earlier_kinds or self.turn_start or self.since_last_reply):
            return replace(self, system=(*self.system, textless))
        if not self.since_last_reply:
            return replace(self, turn_start=(*self.turn_start, textless))
        earlier = tuple(dict.fromkeys((*self.earlier_kinds, *self._finished_kinds())))
        return ConversationOutline(self.system, earlier, (textless,))

    def example_messages(self) -> list[Message]:
        """Return a short conversation of the same shape that ends in the same message."""
        earlier_messages = [message for kind in self.earlier_kinds for message in _example_turn(kind)]
        current_messages = [message for kind in self.current_kinds for message in kind.example()]
        conversation = [*self.system, *earlier_messages, *self.turn_start, *current_messages, *self.since_last_reply]
        # All texts differ: a template may look for a message by comparing it with others.
        return [
            replace(message, content=f"{FILLER_TEXT} {index}") if message.content else message
            for index, message in enumerate(conversation)
        ]

    @property
    def cache_key(self) -> tuple[object, ...]:
        """A key that is equal for conversations that a template cannot distinguish."""
        return (
            message_kinds(self.system),
            self.earlier_kinds,
            message_kinds(self.turn_start),
            self.current_kinds,
            message_kinds(self.since_last_reply),
        )

    def _finished_kinds(self) -> tuple[MessageKind, ...]:
        finished = message_kinds([message for message in self.since_last_reply if message.role == "assistant"])
        return tuple(dict.fromkeys((*self.current_kinds, *finished)))


def message_kinds(messages: Sequence[Message]) -> tuple[MessageKind, ...]:
    """Return the kind of each message."""
    return tuple(map(MessageKind.from_message, messages))


def _example_turn(kind: MessageKind) -> list[Message]:
    """Return a finished turn with a reply of this kind; if it has calls, another reply ends the turn."""
    answer = [Message("assistant", FILLER_TEXT)] if kind.num_calls else []
    return [Message("user", FILLER_TEXT), *kind.example(), *answer]
