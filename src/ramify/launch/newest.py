"""The newest weights of a run: what an engine that is started again should serve."""

from pathlib import Path

from ramify.errors import WeightsRefused
from ramify.model.manifest import MANIFEST, Manifest

WEIGHTS = "weights"


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
