"""Seeds of parts of a run, derived from the seed of the whole."""

import hashlib


def derive_seed(key: str | bytes) -> int:
    """Return a seed of 31 bits that depends on every byte of `key`. Stored runs depend on these values."""
    data = key.encode() if isinstance(key, str) else key
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") >> 1
