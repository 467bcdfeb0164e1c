"""From the name of a model to its directory, without a network.

A name is the model that ships with the package, a directory, or a Hugging Face id that is already in the local cache.
Nothing is downloaded: a run that silently fetches gigabytes is a surprise, and many machines cannot.
"""

import difflib
import os
from pathlib import Path

from ramify.errors import ModelNotFound

PACKAGED = ("tiny",)


def resolve(name: str) -> Path:
    """The directory of the model `name`, holding at least `config.json`."""
    if name in PACKAGED:
        return _checked(name, [Path(__file__).parent.parent / "models" / name])
    tried = [Path(name).expanduser()]
    if _is_id(name):
        tried.append(_cached(name))
    return _checked(name, tried)


def _checked(name: str, tried: list[Path]) -> Path:
    for directory in tried:
        if (directory / "config.json").is_file():
            return directory.resolve()
    reasons = "; ".join(f"{path}: {_why(path)}" for path in tried)
    nearest = difflib.get_close_matches(name, PACKAGED, n=1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "Nothing is downloaded: give a directory"
    raise ModelNotFound(f"model {name!r} was not found ({reasons}). {advice}")


def _why(directory: Path) -> str:
    if not directory.exists():
        return "does not exist"
    return "has no config.json" if directory.is_dir() else "is not a directory"


def is_hub_id(name: str) -> bool:
    """Tell whether a name is of the form ORG/NAME and no directory here."""
    return name.count("/") == 1 and _is_id(name) and not Path(name).exists()


def _is_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) in (1, 2) and all(part and not part.startswith((".", "~")) for part in parts)


def _cached(name: str) -> Path:
    """Where the local Hugging Face cache keeps the main revision of `name`."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    entry = cache / f"models--{name.replace('/', '--')}"
    main = entry / "refs" / "main"
    return entry / "snapshots" / main.read_text().strip() if main.is_file() else entry / "snapshots"
