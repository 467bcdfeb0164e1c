"""A trie of all messages of a rollout, which finds the recorded reply that a client's history continues.

A client sends its whole history with every call, in its own format. Walking the trie message by message finds the reply
that it continues, and so its exact tokens. Two samples may have equal texts but different tokens, or different
reasoning that the client does not send; the walk follows all of them until later messages distinguish them.

    root ── system ── user ── reply ── tool ── reply
                        └──── reply (another sample) ── user ...
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile

from msgspec.structs import replace

from ramify.infer.gateway.canonical import has_same_reasoning, message_key
from ramify.infer.gateway.policy import SampledReply
from ramify.model.render import TokenHistory, ToolSchema
from ramify.model.render.outline import SYSTEM_ROLES
from ramify.trace import Message, ToolCall

MAX_CACHED_HISTORIES = 4  # replies whose history is cached; older histories are rebuilt from the trace


class TrieNode:
    """A message at a position in a conversation.

    `key` identifies the message, `digest` the conversation up to it. A recorded reply also has `trace_node`, `tools`,
    `num_tokens` (of the path up to it) and, while cached, its `history`.
    """

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
        "num_running",
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
        self.last_reply: TrieNode | None = (
            parent.last_reply if parent else None
        )  # the last reply at or before this position
        self.digest = blake2b((parent.digest if parent else b"") + message_key, digest_size=8).digest()
        self.is_recorded = False  # whether the trace has a call whose conversation includes this position
        self.num_calls = 0  # calls started at this position
        self.num_running = 0  # ... and not ended
        self.num_replies = 0  # ... and recorded
        self.trace_node = -1
        self.num_tokens = 0  # of the path up to a reply
        self.tools: tuple[ToolSchema, ...] = ()
        self.history: TokenHistory | None = None

    def messages_after(self, reply: TrieNode | None) -> list[Message]:
        """Return the messages after `reply` up to and including this one."""
        messages: list[Message] = []
        node: TrieNode = self
        while node is not reply and node.parent is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def remove_unused(self) -> None:
        """Remove this position and those before it that no recorded conversation and no running call includes.

        An agent may send many requests that are refused or only counted; their texts must not stay in memory.
        """
        node = self
        while node.parent is not None and not (node.is_recorded or node.children or node.num_running):
            siblings = node.parent.children.get(node.key, [])
            if node in siblings:  # else an equal request has removed it
                siblings.remove(node)
                if not siblings:
                    del node.parent.children[node.key]
            node = node.parent

    def path_to_root(self) -> Iterator[TrieNode]:
        """Yield this node and its ancestors, the root last."""
        node: TrieNode | None = self
        while node is not None:
            yield node
            node = node.parent


class ConversationTrie:
    """The conversations with one policy."""

    def __init__(self) -> None:
        self.root = TrieNode(None, Message(""), b"")
        self._cached_replies: deque[TrieNode] = deque()

    def find_or_insert(self, start: TrieNode, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TrieNode:
        """Return the position after these messages, starting from `start`; insert the messages that are new."""
        candidates, num_matched = [start], 0
        keys = [message_key(message) for message in messages]
        for message, key in zip(messages, keys):
            matches = [
                child
                for candidate in candidates
                for child in candidate.children.get(key, ())
                if has_same_reasoning(child.message, message)
            ]
            if not matches:
                break
            candidates, num_matched = matches, num_matched + 1
        position = (
            candidates[0] if len(candidates) == 1 else max(candidates, key=lambda child: _match_priority(child, tools))
        )
        for message, key in zip(messages[num_matched:], keys[num_matched:]):
            position = _insert_child(position, message, key)
        return position

    def insert_reply(
        self, position: TrieNode, message: Message, trace_node: int, history: TokenHistory, num_tokens: int
    ) -> TrieNode:
        """Insert a recorded reply after `position`."""
        reply = _insert_child(position, message, message_key(message))
        reply.last_reply, reply.trace_node, reply.tools, reply.num_tokens = reply, trace_node, history.tools, num_tokens
        self.cache_history(reply, history)
        position.num_replies += 1
        for ancestor in takewhile(lambda node: not node.is_recorded, reply.path_to_root()):
            ancestor.is_recorded = True
        return reply

    def cache_history(self, reply: TrieNode, history: TokenHistory) -> None:
        """Cache the history of a reply and evict the oldest one.

        A history has all tokens of its path, so caching all of them would need quadratic memory.
        """
        reply.history = history
        self._cached_replies.append(reply)
        if len(self._cached_replies) > MAX_CACHED_HISTORIES:
            self._cached_replies.popleft().history = None


def fork_reason(position: TrieNode) -> str:
    """Return why a call at `position` forks from the recorded conversations."""
    if position.is_recorded:
        return "sample" if position.num_replies else "dropped"
    first_new = next(
        (node for node in position.path_to_root() if node.parent is not None and node.parent.is_recorded), None
    )
    if first_new is None or first_new.parent is None or _is_system_prefix(first_new.parent):
        return "new_conversation"
    return "dropped" if _occurs_below(first_new.parent, first_new.key) else "edited"


def _is_system_prefix(prefix: TrieNode) -> bool:
    """Return whether `prefix` consists of at most the system prompt."""
    return all(node.message.role in SYSTEM_ROLES for node in prefix.path_to_root() if node.parent is not None)


def _occurs_below(prefix: TrieNode, message_key: bytes) -> bool:
    """Return whether a recorded conversation has this message further below `prefix`."""
    pending = [child for siblings in prefix.children.values() for child in siblings if child.is_recorded]
    while pending:
        node = pending.pop()
        if any(child.is_recorded for child in node.children.get(message_key, ())):
            return True
        pending += [child for siblings in node.children.values() for child in siblings if child.is_recorded]
    return False


def _insert_child(parent: TrieNode, message: Message, message_key: bytes) -> TrieNode:
    child = TrieNode(parent, message, message_key)
    parent.children.setdefault(message_key, []).append(child)
    return child


def _match_priority(candidate: TrieNode, tools: Sequence[ToolSchema]) -> tuple[bool, int]:
    """Sort key among equal messages: prefer one whose tokens can be reused (same tools), then the newest."""
    reply = candidate.last_reply
    return (False, -1) if reply is None else (reply.tools == tuple(tools), reply.trace_node)


class CallIdRegistry:
    """The ids of all tool calls of one rollout. An id that the rollout has already used is replaced.

    A client sends back only messages, so all continuations of two equal samples whose calls have equal ids would attach
    to the newest sample.
    """

    def __init__(self) -> None:
        self._used_ids = {""}  # some chat endpoints send no id

    def make_unique(self, sampled: SampledReply, position: TrieNode) -> SampledReply:
        """Return a reply at `position` whose tool calls have new ids where the rollout has already used theirs.

        A new id depends on the conversation and the number of its samples, so a repeated rollout has the same ids.
        """
        calls: list[ToolCall] = []
        for call in sampled.message.tool_calls:
            call_id, seed = call.id, position.digest + b"%d" % position.num_replies
            while call_id in self._used_ids:
                seed = hashlib.sha256(seed).digest()
                call_id = seed.hex()[:9]  # nine letters and digits, as the strictest template requires
            self._used_ids.add(call_id)
            calls.append(call if call_id == call.id else replace(call, id=call_id))
        if tuple(calls) == sampled.message.tool_calls:
            return sampled
        message, history = replace(sampled.message, tool_calls=tuple(calls)), sampled.history
        messages = (*history.messages[:-1], message)
        history = TokenHistory.build(
            messages, history.tools, history.token_ids, num_sampled=history.num_sampled, images=history.images
        )
        return replace(sampled, message=message, history=history)
