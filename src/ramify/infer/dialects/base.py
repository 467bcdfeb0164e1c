"""The `Dialect` base class: the format of requests and responses of one API."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ramify.core.errors import RamifyError
from ramify.infer.dialects.http_format import format_openai_error, format_sse, get_error_code
from ramify.infer.dialects.model_call import ModelReply, ParsedRequest
from ramify.infer.dialects.response_store import ResponseStore

COMMON_FIELDS = frozenset(
    {"model", "stream", "tools", "tool_choice", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"}
)
"""Fields of a request that have an effect in every dialect."""


class Dialect(ABC):
    """The request and response format of one API."""

    keepalive = b": waiting\n\n"
    """The bytes that a waiting stream sends."""
    own_fields: ClassVar[frozenset[str]]
    """Fields of a request that have an effect, beyond `COMMON_FIELDS`. All others are ignored."""

    def find_ignored_fields(self, body: Mapping[str, Any]) -> list[str]:
        """Return the names of the fields of a request that have no effect."""
        return [name for name in body if name not in self.own_fields and name not in COMMON_FIELDS]

    @abstractmethod
    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse the body of a request, which may refer to what is in `store`; unknown fields are ignored."""

    @abstractmethod
    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Format the reply as one object."""

    @abstractmethod
    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """Yield the reply as server-sent events."""

    @abstractmethod
    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Format the response to a request for the number of prompt tokens."""

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        """Format an error as one object; by default in the format of OpenAI."""
        return format_openai_error(error.message, error.name, get_error_code(error))

    def format_stream_error(self, error: RamifyError) -> bytes:
        """Format an error inside a stream."""
        return format_sse(self.format_error(error))
