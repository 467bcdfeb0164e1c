"""A tokenizer that needs only the `tokenizer.json` of a model directory.

`transformers` would import torch for this. The `tokenizers` library does not, and it reports the characters of each
token, which convert spans of text to spans of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.model.images import load_image_family
from ramify.trace.columns import Int32Array

if TYPE_CHECKING:
    import tokenizers


P = ParamSpec("P")
T = TypeVar("T")

OFFLOAD_MIN_TOKENS = 1024
OFFLOAD_MIN_CHARS = 16_384


async def offload(is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` and return its result; run it in a thread if `is_large`.

    Handing work to a thread costs about as much as parsing a small reply. Parsing a large one in the event loop would
    hold up heartbeats, timeouts and the streams of other clients.
    """
    if is_large:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


class EncodedText(NamedTuple):
    """Token ids, and the characters [start, stop) of each token."""

    ids: Int32Array
    starts: Int32Array
    stops: Int32Array


class Tokenizer:
    """The tokenizer of a model directory, loaded on first use.

    No method adds special tokens: the template writes all of them.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "tokenizer.json"
        self.name = str(directory)
        if not self._file.exists():
            raise ConfigInvalid(f"model: {directory} has no tokenizer.json; convert its tokenizer to the fast format")

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library. Raises ConfigInvalid if its file cannot be read."""
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigInvalid(f"model: {self._file} cannot be read: {error}") from error
        # A post-processor adds special tokens and shifts the offsets of tokens that begin with a space.
        backend.post_processor = None
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def digest(self) -> str:
        """A hash of the files that decide which ids a text and an image have."""
        digest, files = hashlib.sha256(), [self._file]
        with contextlib.suppress(ModelUnsupported, ConfigInvalid):  # no images are read then
            if load_image_family(self._file.parent) is not None:
                files.append(self._file.with_name("preprocessor_config.json"))
        for file in files:
            digest.update(file.read_bytes() if file.is_file() else b"")
        return digest.hexdigest()

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the added tokens (roles, ends of turns, tool tags), by their text."""
        return {token.content: id for id, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def tag_ids(self) -> Mapping[str, int]:
        """The ids of the added tokens that a grammar takes for tags, not for text: special ones, and all like `<x>`."""
        added = self.backend.get_added_tokens_decoder()
        texts = {token.content: id for id, token in added.items()}
        special = {token.content for token in added.values() if token.special}
        return {text: id for text, id in texts.items() if text in special or (text[:1], text[-1:]) == ("<", ">")}

    @cached_property
    def _anchor_token(self) -> str:
        """A special token without lstrip or rstrip. Text encoded after it is not treated as the start of a text."""
        added = self.backend.get_added_tokens_decoder().values()
        return next((token.content for token in added if token.special and not (token.lstrip or token.rstrip)), "")

    def encode(self, text: str, *, continues_text: bool = False) -> EncodedText:
        """Encode a text; `continues_text` says that other tokens precede it."""
        anchor = self._anchor_token if continues_text else ""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate, which has no bytes, becomes `?`
        encoding = self._encode(anchor + text)
        skip = 1 if anchor else 0
        spans = encoding.offsets[skip:]
        flat = np.fromiter(chain.from_iterable(spans), np.int32, 2 * len(spans))
        offsets = flat.reshape(-1, 2) - len(anchor)
        return EncodedText(np.array(encoding.ids[skip:], np.int32), offsets[:, 0], offsets[:, 1])

    def _encode(self, text: str) -> tokenizers.Encoding:
        """Encode a text. The library releases the GIL only for batches, so a large text is encoded as a batch."""
        if len(text) < OFFLOAD_MIN_CHARS:
            return self.backend.encode(text, add_special_tokens=False)
        return self.backend.encode_batch([text], add_special_tokens=False)[0]

    @cached_property
    def max_token_chars(self) -> int:
        """The length of the longest token in the vocabulary; n characters are at least n / this many tokens."""
        return max(map(len, self.backend.get_vocab()), default=1)

    def decode(self, token_ids: npt.ArrayLike, *, keep_special_tokens: bool = True) -> str:
        """Return the text of tokens, with or without special tokens."""
        tokens: Sequence[int] = np.asarray(token_ids, np.int64).tolist()
        return self.backend.decode(tokens, skip_special_tokens=not keep_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have it."""
        return self.backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        """Return the token of an id, or None if the vocabulary does not have it."""
        return self.backend.id_to_token(id)
