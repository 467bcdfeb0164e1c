"""What later requests of the Responses API may refer to: replies by the id of their call, and conversations.

Only the newest entries are kept, so that a server's memory does not grow with the number of requests.
"""

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.bounded_cache import BoundedCache
from ramify.dialects.model_call import ModelReply, ParsedRequest
from ramify.errors import RequestInvalid
from ramify.trace import Message

MAX_STORED_REPLIES = 1000
MAX_CONVERSATIONS = 32


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply and the request that it answers."""

    parsed: ParsedRequest
    reply: ModelReply


@dataclass(slots=True)
class StoredConversation:
    """A conversation that the client refers to by `id`: the messages it was created with, and its last call."""

    id: str
    messages: tuple[Message, ...] = ()
    created_at: int = field(default_factory=lambda: int(time.time()))
    last_call_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the conversation as OpenAI's `conversation` object."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": {}}


class ResponseStore:
    """The replies and conversations of one session. With `keeps_messages` the messages of the requests are kept too."""

    def __init__(self, *, keeps_messages: bool = False) -> None:
        self._keeps_messages = keeps_messages
        self._replies: BoundedCache[str, StoredReply] = BoundedCache(MAX_STORED_REPLIES)
        self._conversations: BoundedCache[str, StoredConversation] = BoundedCache(MAX_CONVERSATIONS)

    def add(self, parsed: ParsedRequest, reply: ModelReply) -> None:
        """Store a reply, and make it the last one of its conversation."""
        if parsed.conversation_id is not None:
            self.get_conversation(parsed.conversation_id).last_call_id = reply.call_id
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
