"""What later requests of the Responses API may refer to: replies by the id of their call, and conversations.

Only the newest entries are kept, so that a server's memory does not grow with the number and the size of requests.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.model_call import ModelReply, ParsedRequest
from ramify.trace import Message

MAX_STORED_REPLIES = 1000
MAX_STORED_BYTES = 256 * 2**20  # of the replies and their requests: texts, and images
MAX_CONVERSATIONS = 1000
MAX_CONVERSATION_BYTES = 16 * 2**20  # of the texts with which conversations begin


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply and the request that it answers."""

    parsed: ParsedRequest
    reply: ModelReply

    @property
    def num_bytes(self) -> int:
        """The size of the texts and images, at least an equal share of what is stored."""
        request = self.parsed.request
        num_bytes = _count_chars((*request.messages, self.reply.message))
        num_bytes += sum(len(media.data) for media in request.media.values())
        return max(num_bytes, MAX_STORED_BYTES // MAX_STORED_REPLIES)


@dataclass(slots=True)
class StoredConversation:
    """A conversation that the client refers to by `id`: the messages it was created with, and its last call."""

    id: str
    messages: tuple[Message, ...] = ()
    created_at: int = field(default_factory=lambda: int(time.time()))
    last_call_id: str | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the texts, at least an equal share of what is stored."""
        return max(_count_chars(self.messages), MAX_CONVERSATION_BYTES // MAX_CONVERSATIONS)

    def to_dict(self) -> dict[str, Any]:
        """Return the conversation as OpenAI's `conversation` object."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": {}}


class ResponseStore:
    """The replies and conversations of one session. With `keeps_messages` the messages of the requests are kept too."""

    def __init__(self, *, keeps_messages: bool = False) -> None:
        self._keeps_messages = keeps_messages
        self._replies: BoundedCache[str, StoredReply] = BoundedCache(
            MAX_STORED_BYTES, measure=lambda reply: reply.num_bytes
        )
        self._conversations: BoundedCache[str, StoredConversation] = BoundedCache(
            MAX_CONVERSATION_BYTES, measure=lambda conversation: conversation.num_bytes
        )

    def add(self, parsed: ParsedRequest, reply: ModelReply) -> None:
        """Store a reply, and make it the last one of its conversation."""
        conversation = self._conversations.get(parsed.conversation_id or "")
        if conversation is not None:  # it may have been removed since the request came
            conversation.last_call_id = reply.call_id
        if not self._keeps_messages:
            parsed = replace(parsed, request=replace(parsed.request, messages=(), tools=(), media={}))
        self._replies.put(reply.call_id, StoredReply(parsed, reply))

    def find_reply(self, call_id: str) -> StoredReply | None:
        """Return the stored reply of a call, or None."""
        return self._replies.get(call_id)

    def create_conversation(self, messages: tuple[Message, ...]) -> StoredConversation:
        """Create a conversation that begins with these messages."""
        conversation = StoredConversation(f"conv_{secrets.token_hex(12)}", messages)
        self._conversations.put(conversation.id, conversation)
        return conversation

    def get_conversation(self, conversation_id: str) -> StoredConversation:
        """Return a conversation. Raises RequestInvalid if there is none of this id."""
        conversation = self._conversations.get(conversation_id)
        if conversation is None:
            raise RequestInvalid(
                f"conversation: {conversation_id!r} is not known here; create it with /v1/conversations"
            )
        return conversation


def _count_chars(messages: Iterable[Message]) -> int:
    return sum(len(message.text) + len(message.reasoning or "") for message in messages)
