"""Text to token ids and back, from a model directory's `tokenizer.json` alone.

`transformers` would import torch to do the same. The `tokenizers` library is the part of it that matters, and it also
says which characters each token covers, which is how spans of text become spans of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ramify.errors import ConfigInvalid
from ramify.render.offload import OFFLOAD_MIN_CHARS

if TYPE_CHECKING:
    import tokenizers

Int32Array = npt.NDArray[np.int32]


class EncodedText(NamedTuple):
    """Token ids, and the characters [start, stop) that each of them covers."""

    ids: Int32Array
    starts: Int32Array
    stops: Int32Array


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer. No method adds tokens of its own: templates write them all."""

    @property
    def name(self) -> str: ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The tokens that stand outside the text (roles, ends of turns, tool tags), by how they are written."""
        ...

    @property
    def max_token_chars(self) -> int:
        """The length of the longest token as the vocabulary spells it: a text of n characters has at least n / this."""
        ...

    def encode(self, text: str, *, continues_text: bool = False) -> EncodedText:
        """The tokens of a text; `inside` where other tokens stand before it."""
        ...

    def decode(self, token_ids: npt.ArrayLike, *, keep_special_tokens: bool = True) -> str:
        """The text of these tokens, with or without the special ones."""
        ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...


class FileTokenizer:
    """The tokenizer of a model directory, read when it is first used."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "tokenizer.json"
        self.name = str(directory)
        if not self._file.exists():
            raise ConfigInvalid(f"model: {directory} has no tokenizer.json; convert its tokenizer to the fast format")

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigInvalid(f"model: {self._file} cannot be read: {error}") from error
        # A post-processor adds tokens we do not ask for, and moves the offsets of those that begin with a space.
        backend.post_processor = None
        backend.no_truncation()
        backend.no_padding()
        return backend

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self._added_tokens

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        return {token.content: id for id, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _anchor_token(self) -> str:
        """A token that swallows no space around it: text encoded behind it is not taken for a beginning."""
        added = self.backend.get_added_tokens_decoder().values()
        return next((token.content for token in added if token.special and not (token.lstrip or token.rstrip)), "")

    def encode(self, text: str, *, continues_text: bool = False) -> EncodedText:
        anchor = self._anchor_token if continues_text else ""
        encoding = self._encode(anchor + _replace_surrogates(text))
        skip = 1 if anchor else 0
        places = encoding.offsets[skip:]
        flat = np.fromiter(chain.from_iterable(places), np.int32, 2 * len(places))
        offsets = flat.reshape(-1, 2) - len(anchor)
        return EncodedText(np.array(encoding.ids[skip:], np.int32), offsets[:, 0], offsets[:, 1])

    def _encode(self, text: str) -> tokenizers.Encoding:
        """Encode a text. The library releases the GIL only while it encodes a batch, so a large text is made one."""
        if len(text) < OFFLOAD_MIN_CHARS:
            return self.backend.encode(text, add_special_tokens=False)
        return self.backend.encode_batch([text], add_special_tokens=False)[0]

    @property
    def max_token_chars(self) -> int:
        return self._max_token_chars

    @cached_property
    def _max_token_chars(self) -> int:
        return max(map(len, self.backend.get_vocab()), default=1)

    def decode(self, token_ids: npt.ArrayLike, *, keep_special_tokens: bool = True) -> str:
        tokens: Sequence[int] = np.asarray(token_ids, np.int64).tolist()
        return self.backend.decode(tokens, skip_special_tokens=not keep_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self.backend.id_to_token(id)


def _replace_surrogates(text: str) -> str:
    """The text with a question mark for each lone surrogate (half of a pair that a model wrote), which has no bytes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
