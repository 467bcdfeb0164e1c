"""What the server needs to know about text: a narrow door to the package that renders.

The engine speaks token ids only. Chat and text prompts need something that turns messages into ids and ids back into
messages; the server takes anything of this shape, or nothing, and then serves token ids alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `source` is the renderer's own, for `parse` to look at."""

    token_ids: list[int]
    rendered: object = None


class ChatRenderer(Protocol):
    """Messages, tools and text to token ids, and back. Messages are of the OpenAI chat form."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / this many tokens."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> ChatPrompt:
        """The prompt for the next assistant turn."""
        ...

    def parse(self, token_ids: Sequence[int], prompt: ChatPrompt) -> dict[str, Any]:
        """Sampled ids as an assistant message: `content`, and `tool_calls` or `reasoning_content` if there are any."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text as token ids, special tokens recognised."""
        ...

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, also of a special one."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""
        ...
