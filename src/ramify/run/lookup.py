"""Names of runs: the default one, and the run that has one."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.core.errors import ConfigInvalid
from ramify.core.names import find_similar
from ramify.core.watchdog import watch_storage
from ramify.run.store.index import DATABASE_NAME, check_index_file

OUTPUT_DIR = Path("outputs")
HASH_DIGITS = 6
MAX_LISTED = 8  # runs in a message


def default_run_name(taskset: str, model: str, identity: Mapping[str, Any]) -> str:
    """Return a readable name with a hash of the identity, such as `reverse-text-tiny-1f3a9c`."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{_slugify(taskset)}-{_slugify(model)}-{hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]}"


def _slugify(text: str) -> str:
    """Return the last part of a path or dotted name, without characters that do not belong in a file name."""
    last = re.split(r"[/\\:]", text.rstrip("/\\"))[-1].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "run"


def find_run(name: str) -> Path:
    """Return the directory of the run with this name or path. Raises RunDamaged for one that has lost its index."""
    with watch_storage(name):
        for path in (Path(name), OUTPUT_DIR / name):
            check_index_file(path)
            if (path / DATABASE_NAME).is_file():
                return path
        raise ConfigInvalid(f"no run {name!r}; {_suggest_run(name)}")


def _suggest_run(name: str) -> str:
    """Return the run that may have been meant, else those in the folder where it was looked for."""
    parent = Path(name).parent
    folder = OUTPUT_DIR if parent == Path() else parent
    runs = sorted(path.parent.name for path in folder.glob(f"*/{DATABASE_NAME}"))
    if similar := find_similar(Path(name).name, runs):
        return f"did you mean {str(parent / similar)!r}?"
    others = f" and {len(runs) - MAX_LISTED} others" if len(runs) > MAX_LISTED else ""
    return f"{folder} has {', '.join(runs[:MAX_LISTED]) or 'no runs'}{others}"
