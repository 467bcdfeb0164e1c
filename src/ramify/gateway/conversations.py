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

from ramify.gateway.canonical import key, same_reasoning
from ramify.render import TokenHistory, ToolSchema
from ramify.trace import Message

OPENING = ("system", "developer")
FRESH = 4  # replies whose history is kept ready; those of older ones are read from the trace again


class Said:
    """A message at its place in a conversation. A reply also has its node in the trace, its tools and its history."""

    __slots__ = (
        "committed",
        "digest",
        "following",
        "history",
        "key",
        "last",
        "length",
        "message",
        "node",
        "parent",
        "replies",
        "root",
        "started",
        "tools",
    )

    def __init__(self, parent: Said | None, message: Message, name: bytes) -> None:
        self.parent, self.message, self.key = parent, message, name
        self.root: Said = parent.root if parent else self
        self.following: dict[bytes, list[Said]] = {}
        self.last: Said | None = parent.last if parent else None  # the nearest reply up to here
        self.digest = blake2b((parent.digest if parent else b"") + name, digest_size=8).digest()
        self.committed = False  # whether the trace holds a call that passed here
        self.started = 0  # calls that were made right here
        self.replies = 0  # ... and answered
        self.node = -1
        self.length = 0  # tokens of the path up to a reply
        self.tools: tuple[ToolSchema, ...] = ()
        self.history: TokenHistory | None = None

    def since(self, reply: Said | None) -> list[Message]:
        """The messages after `reply` up to and with this one."""
        found: list[Message] = []
        at: Said | None = self
        while at is not None and at is not reply and at.parent is not None:
            found.append(at.message)
            at = at.parent
        return found[::-1]

    def up(self) -> Iterator[Said]:
        """This message and all before it, the root last."""
        at: Said | None = self
        while at is not None:
            yield at
            at = at.parent


class Conversations:
    """The trie of one policy."""

    def __init__(self) -> None:
        self.root = Said(None, Message(""), b"")
        self._fresh: deque[Said] = deque()

    def reach(self, start: Said, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Said:
        """The place that these messages lead to from `start`; what is not known yet is added."""
        at, reached = [start], 0
        names = [key(message) for message in messages]
        for message, name in zip(messages, names):
            found = [
                said for here in at for said in here.following.get(name, ()) if same_reasoning(said.message, message)
            ]
            if not found:
                break
            at, reached = found, reached + 1
        end = at[0] if len(at) == 1 else max(at, key=lambda said: _likely(said, tools))
        for message, name in zip(messages[reached:], names[reached:]):
            end = _add(end, message, name)
        return end

    def reply(self, end: Said, message: Message, node: int, history: TokenHistory, length: int) -> Said:
        """Add a recorded reply behind `end`."""
        said = _add(end, message, key(message))
        said.last, said.node, said.tools, said.length = said, node, history.tools, length
        self.keep(said, history)
        end.replies += 1
        at: Said | None = said
        while at is not None and not at.committed:
            at.committed = True
            at = at.parent
        return said

    def keep(self, said: Said, history: TokenHistory) -> None:
        """Have the history of a reply ready, and let go of one that has not been used for long.

        Each holds all tokens before it: keeping every one would grow with the square of the conversation.
        """
        said.history = history
        self._fresh.append(said)
        if len(self._fresh) > FRESH:
            self._fresh.popleft().history = None


def parting(end: Said) -> str:
    """Why a call at `end` leaves the conversations that are recorded: the reason of a fork."""
    if end.committed:
        return "sample" if end.replies else "dropped"
    first = next((said for said in end.up() if said.parent is not None and said.parent.committed), None)
    if first is None or first.parent is None or _opening(first.parent):
        return "new_conversation"
    return "dropped" if _said_below(first.parent, first.key) else "edited"


def _opening(stem: Said) -> bool:
    """Whether no more than the system prompt is shared."""
    return all(said.message.role in OPENING for said in stem.up() if said.parent is not None)


def _said_below(stem: Said, name: bytes) -> bool:
    """Whether a recorded conversation came from `stem` to such a message later on."""
    todo = [said for row in stem.following.values() for said in row if said.committed]
    while todo:
        here = todo.pop()
        if any(said.committed for said in here.following.get(name, ())):
            return True
        todo += [said for row in here.following.values() for said in row if said.committed]
    return False


def _add(parent: Said, message: Message, name: bytes) -> Said:
    said = Said(parent, message, name)
    parent.following.setdefault(name, []).append(said)
    return said


def _likely(said: Said, tools: Sequence[ToolSchema]) -> tuple[bool, int]:
    """Of messages that read the same, the one whose tokens can stay comes first, then the newest."""
    last = said.last
    return (False, -1) if last is None else (last.tools == tuple(tools), last.node)
