"""The newest weights of a run: what an engine that is started again should serve."""

import os
import shutil
from pathlib import Path

from ramify.errors import WeightsRefused
from ramify.model.manifest import MANIFEST, Manifest

WEIGHTS, SERVED = "weights", "served"
TRIES = 5  # a version may be removed while it is looked at


def newest(run: Path) -> Path | None:
    """The directory of the last published version; None where there is none yet."""
    found: list[tuple[int, int, Path]] = []
    for place in (run / WEIGHTS).glob(f"*/{MANIFEST}"):
        try:
            version = Manifest.read(place.parent).version
        except WeightsRefused:
            continue  # removed while we looked
        found.append((version.incarnation, version.step, place.parent))
    return max(found)[2] if found else None


def newest_kept(run: Path) -> Path | None:
    """The newest weights under a name of the engine's own, which nobody removes while it starts."""
    for _ in range(TRIES):
        if (found := newest(run)) is None:
            return None
        shutil.rmtree(run / SERVED, ignore_errors=True)
        try:
            return Path(shutil.copytree(found, run / SERVED / found.name, copy_function=os.link))
        except OSError:
            continue
    return None
