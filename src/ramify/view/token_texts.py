"""The texts of single tokens, from the `tokenizer.json` of a run's model.

Decoding tokens one by one would lose spaces at their beginning and characters that are split between tokens. So each
token becomes the bytes that it stands for, and the bytes are decoded in order: a split character appears at the token
that completes it.
"""

import codecs
import re
from collections.abc import Iterable
from pathlib import Path

from ramify.core.errors import RamifyError
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BOUNDARY = "▁"  # how tokenizers of the SentencePiece kind write a space


class TokenTexts:
    """Returns the texts of token ids. Without a tokenizer, a text is the id in angle brackets."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes_by_id: dict[int, bytes] = {}
        self._is_byte_level = tokenizer is not None and "ByteLevel" in str(tokenizer.backend.decoder)

    @classmethod
    def load(cls, model: str) -> "TokenTexts":
        """Load the tokenizer of a model, if it is on this machine."""
        try:
            return cls(Tokenizer(Path(resolve_model_path(model))))
        except (RamifyError, OSError, RuntimeError, ValueError):  # the configuration of a run may hold any name
            return cls(None)

    def decode(self, token_ids: Iterable[int]) -> list[str]:
        """Return one text per token; together they are the text of all tokens.

        The last text shows the bytes of a character that no token completes as a replacement character.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._get_bytes(id)) for id in token_ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _get_bytes(self, id: int) -> bytes:
        data = self._bytes_by_id.get(id)
        if data is None:
            data = self._bytes_by_id[id] = self._to_bytes(id)
        return data

    def _to_bytes(self, id: int) -> bytes:
        token = None if self._tokenizer is None or id < 0 else self._tokenizer.id_to_token(id)
        if self._tokenizer is None or token is None:
            return f"⟨{id}⟩".encode()
        if token in self._tokenizer.added_tokens:
            return token.encode()
        if self._is_byte_level:
            return b"".join(BYTE_BY_CHARACTER.get(character, character.encode()) for character in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(WORD_BOUNDARY, " ").encode()


def _map_bytes() -> dict[str, bytes]:
    """Return the byte of each character in the vocabulary of a byte-level tokenizer.

    Printable bytes stand for themselves; the others are numbered from character 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


BYTE_BY_CHARACTER = _map_bytes()
