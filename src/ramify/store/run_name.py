"""What a run is called that nobody has named."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

HASH_DIGITS = 6  # of the hash


def default_run_name(taskset: str, model: str, identity: Mapping[str, Any]) -> str:
    """`reverse-text-tiny-1f3a9c`: readable, and another one for another identity."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{_slugify(taskset)}-{_slugify(model)}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}"


def _slugify(text: str) -> str:
    """The last part of a path or dotted name, without what a file name should not hold."""
    last = re.split(r"[/\\:]", text.rstrip("/\\"))[-1].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "run"
