"""The interface of the server to `ramify.render`.

The engine only takes token ids. Chat and text prompts need a renderer that turns messages into ids and ids back into
messages. Without one the server only serves token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `rendered` is the renderer's own object, which `parse` needs."""

    token_ids: list[int]
    rendered: object = None


class ChatRenderer(Protocol):
    """Converts messages, tools and text to token ids, and back. Messages are in the OpenAI chat format."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        ...

    @property
    def max_token_chars(self) -> int:
        """The number of characters of the longest token: a text of n characters has at least n / this many tokens."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> ChatPrompt:
        """Return the prompt for the next assistant turn."""
        ...

    def parse(self, token_ids: Sequence[int], prompt: ChatPrompt) -> dict[str, Any]:
        """Parse sampled ids into a message with `content`, and if present `tool_calls` and `reasoning_content`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in it are recognized."""
        ...

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, which may be special."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...
