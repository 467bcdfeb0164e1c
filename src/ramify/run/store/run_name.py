"""The default name of a run."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

HASH_DIGITS = 6


def default_run_name(taskset: str, model: str, identity: Mapping[str, Any]) -> str:
    """Return a readable name with a hash of the identity, such as `reverse-text-tiny-1f3a9c`."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{_slugify(taskset)}-{_slugify(model)}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}"


def _slugify(text: str) -> str:
    """Return the last part of a path or dotted name, without characters that do not belong in a file name."""
    last = re.split(r"[/\\:]", text.rstrip("/\\"))[-1].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "run"
