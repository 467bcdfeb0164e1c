"""Every conversation of a rollout in one trie of messages, so that a client's history is found again.

A client sends its whole history with every call, in its own words. Walking the trie message by message finds the reply
it continues, and so its exact tokens. Two samples may read the same and differ in tokens, or in reasoning the client
does not send; the walk follows all of them until later messages tell them apart.

    root ── system ── user ── reply ── tool ── reply
                        └──── reply (another sample) ── user ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from ramify.gateway.canonical import has_same_reasoning, message_key
from ramify.render import TokenHistory, ToolSchema
from ramify.trace import Message

SYSTEM_ROLES = ("system", "developer")
MAX_CACHED_HISTORIES = 4  # replies whose history is kept ready; those of older ones are read from the trace again


class TrieNode:
    """A message at its place in a conversation. A reply also has its node in the trace, its tools and its history."""

    __slots__ = (
        "children",
        "digest",
        "history",
        "is_recorded",
        "key",
        "last_reply",
        "message",
        "num_calls",
        "num_replies",
        "num_tokens",
        "parent",
        "root",
        "tools",
        "trace_node",
    )

    def __init__(self, parent: TrieNode | None, message: Message, message_key: bytes) -> None:
        self.parent, self.message, self.key = parent, message, message_key
        self.root: TrieNode = parent.root if parent else self
        self.children: dict[bytes, list[TrieNode]] = {}
        self.last_reply: TrieNode | None = parent.last_reply if parent else None  # the nearest reply up to here
        self.digest = blake2b((parent.digest if parent else b"") + message_key, digest_size=8).digest()
        self.is_recorded = False  # whether the trace holds a call that passed here
        self.num_calls = 0  # calls that were made right here
        self.num_replies = 0  # ... and answered
        self.trace_node = -1
        self.num_tokens = 0  # tokens of the path up to a reply
        self.tools: tuple[ToolSchema, ...] = ()
        self.history: TokenHistory | None = None

    def messages_after(self, reply: TrieNode | None) -> list[Message]:
        """The messages after `reply` up to and with this one."""
        found: list[Message] = []
        at: TrieNode | None = self
        while at is not None and at is not reply and at.parent is not None:
            found.append(at.message)
            at = at.parent
        return found[::-1]

    def path_to_root(self) -> Iterator[TrieNode]:
        """This message and all before it, the root last."""
        at: TrieNode | None = self
        while at is not None:
            yield at
            at = at.parent


class ConversationTrie:
    """The trie of one policy."""

    def __init__(self) -> None:
        self.root = TrieNode(None, Message(""), b"")
        self._cached_replies: deque[TrieNode] = deque()

    def find_or_insert(self, start: TrieNode, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TrieNode:
        """The place that these messages lead to from `start`; what is not known yet is added."""
        at, reached = [start], 0
        names = [message_key(message) for message in messages]
        for message, name in zip(messages, names):
            found = [
                said for here in at for said in here.children.get(name, ()) if has_same_reasoning(said.message, message)
            ]
            if not found:
                break
            at, reached = found, reached + 1
        end = at[0] if len(at) == 1 else max(at, key=lambda said: _match_priority(said, tools))
        for message, name in zip(messages[reached:], names[reached:]):
            end = _insert_child(end, message, name)
        return end

    def insert_reply(
        self, position: TrieNode, message: Message, trace_node: int, history: TokenHistory, num_tokens: int
    ) -> TrieNode:
        """Add a recorded reply behind `end`."""
        said = _insert_child(position, message, message_key(message))
        said.last_reply, said.trace_node, said.tools, said.num_tokens = said, trace_node, history.tools, num_tokens
        self.cache_history(said, history)
        position.num_replies += 1
        at: TrieNode | None = said
        while at is not None and not at.is_recorded:
            at.is_recorded = True
            at = at.parent
        return said

    def cache_history(self, reply: TrieNode, history: TokenHistory) -> None:
        """Have the history of a reply ready, and let go of one that has not been used for long.

        Each holds all tokens before it: keeping every one would grow with the square of the conversation.
        """
        reply.history = history
        self._cached_replies.append(reply)
        if len(self._cached_replies) > MAX_CACHED_HISTORIES:
            self._cached_replies.popleft().history = None


def fork_reason(position: TrieNode) -> str:
    """Why a call at `end` leaves the conversations that are recorded: the reason of a fork."""
    if position.is_recorded:
        return "sample" if position.num_replies else "dropped"
    first = next(
        (said for said in position.path_to_root() if said.parent is not None and said.parent.is_recorded), None
    )
    if first is None or first.parent is None or _is_system_prefix(first.parent):
        return "new_conversation"
    return "dropped" if _occurs_below(first.parent, first.key) else "edited"


def _is_system_prefix(prefix: TrieNode) -> bool:
    """Whether no more than the system prompt is shared."""
    return all(said.message.role in SYSTEM_ROLES for said in prefix.path_to_root() if said.parent is not None)


def _occurs_below(prefix: TrieNode, message_key: bytes) -> bool:
    """Whether a recorded conversation came from `stem` to such a message later on."""
    todo = [said for row in prefix.children.values() for said in row if said.is_recorded]
    while todo:
        here = todo.pop()
        if any(said.is_recorded for said in here.children.get(message_key, ())):
            return True
        todo += [said for row in here.children.values() for said in row if said.is_recorded]
    return False


def _insert_child(parent: TrieNode, message: Message, message_key: bytes) -> TrieNode:
    said = TrieNode(parent, message, message_key)
    parent.children.setdefault(message_key, []).append(said)
    return said


def _match_priority(candidate: TrieNode, tools: Sequence[ToolSchema]) -> tuple[bool, int]:
    """Of messages that read the same, the one whose tokens can stay comes first, then the newest."""
    last = candidate.last_reply
    return (False, -1) if last is None else (last.tools == tuple(tools), last.trace_node)
