"""The content of a request or reply: one msgpack value, and blobs that are sent without copying."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ramify.core.errors import RequestInvalid

T = TypeVar("T")
Frame = bytes | memoryview

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class WireMessage:
    """The frames of one message: the first holds a msgpack value, the others are blobs."""

    frames: Sequence[Frame]

    @classmethod
    def encode(cls, value: Any = None, *blobs: Frame) -> "WireMessage":
        """Return a message of `value` and `blobs`."""
        return cls((_encode(value), *blobs))

    def decode(self, expected_type: type[T]) -> T:
        """Return the value. Raises RequestInvalid if it is no `expected_type`."""
        try:
            return msgspec.msgpack.decode(self.frames[0] if self.frames else b"", type=expected_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestInvalid(f"expected a {getattr(expected_type, '__name__', expected_type)}: {error}") from error

    @property
    def blobs(self) -> Sequence[Frame]:
        """The frames after the value."""
        return self.frames[1:]
