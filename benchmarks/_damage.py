"""Damage to the files of a run that is not running, and its repair: what a bad disk or a careless hand would do.

The content before is kept, so that a run which refuses the file can be given it back.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ramify.train.checkpoint_manifest import list_checkpoints

PAGE = 4096  # bytes of a page of a disk, and of SQLite
FLIPPED = 16  # bytes that are inverted
TRIES = 20  # to damage a database in a way that changes what it says

CHECKPOINT, LEDGER, SEGMENT = "a checkpoint", "the ledger", "a trace segment"
TARGETS = (CHECKPOINT, LEDGER, SEGMENT)


def flip_bytes(path: Path, rng: random.Random) -> None:
    """Invert a few bytes in a row."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(content) - FLIPPED))
    content[start : start + FLIPPED] = bytes(byte ^ 0xFF for byte in content[start : start + FLIPPED])
    path.write_bytes(content)


def zero_page(path: Path, rng: random.Random) -> None:
    """Overwrite one page with zeros, not one that holds only zeros."""
    content = bytearray(path.read_bytes())
    pages = [start for start in range(0, len(content), PAGE) if any(content[start : start + PAGE])]
    start = rng.choice(pages)
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    """Cut the file somewhere in its last half."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(rng.randrange(size // 2, size))


def empty(path: Path, _: random.Random) -> None:
    """Leave a file without content."""
    path.write_bytes(b"")


def remove(path: Path, _: random.Random) -> None:
    """Delete the file."""
    path.unlink()


# A killed run has no checksum of its ledger: inverted bytes inside a value are a value, so pages are zeroed instead.
WAYS: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    CHECKPOINT: (flip_bytes, zero_page, truncate, empty, remove),
    LEDGER: (zero_page, truncate, empty, remove),
    SEGMENT: (flip_bytes, zero_page, truncate, remove),
}


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that was damaged, with a copy of it as it was."""

    target: str
    way: str
    path: Path
    copies: dict[Path, bytes]
    """The content of the file before, and of the files that belong to it."""
    damaged: list[bytes] = field(default_factory=list[bytes])
    """The content of a segment after it was damaged, unless it was removed."""

    def __str__(self) -> str:
        return f"{self.way} of {self.path.name} ({self.target})"

    def repair(self) -> None:
        """Write the files back as they were; what a run has written to a segment since is kept.

        A run cuts the end of a segment that was not committed when it was killed, and writes other rollouts there.
        """
        for path, content in self.copies.items():
            if not self.damaged or not path.exists():
                path.write_bytes(content)
                continue
            current = bytearray(path.read_bytes())
            current += content[len(current) :]
            pairs = zip(current, self.damaged[0])
            unchanged = next((index for index, (byte, damaged) in enumerate(pairs) if byte != damaged), len(content))
            path.write_bytes(content[:unchanged] + current[unchanged:])


def damage(run: Path, target: str, rng: random.Random) -> Damage | None:
    """Damage one file of the run; None if it has none of this kind yet."""
    files = [path for path in _files(run, target) if path.stat().st_size]
    if not files:
        return None
    path, way = rng.choice(files), rng.choice(WAYS[target])
    together = [path, *path.parent.glob(f"{path.name}-wal")]  # a copy of a database includes its write-ahead log
    copies = {each: each.read_bytes() for each in together}
    inflicted = Damage(target, way.__name__, path, copies)
    before = _dump(together) if target == LEDGER else None
    for _ in range(TRIES):
        way(path, rng)
        if target == SEGMENT and path.exists():
            inflicted.damaged[:] = [path.read_bytes()]
        if target != LEDGER or _dump(together) != before:
            return inflicted
        inflicted.repair()  # nobody could notice: the write-ahead log holds a newer copy of the page, or it is free
    return None


def _dump(files: list[Path]) -> list[str] | None:
    """Return all that SQLite reads in copies of a database and its write-ahead log; None if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            if file.exists():
                shutil.copy2(file, folder)
        try:
            with contextlib.closing(sqlite3.connect(Path(folder) / files[0].name)) as connection:
                return list(connection.iterdump())
        except sqlite3.Error:
            return None


def _files(run: Path, target: str) -> list[Path]:
    if target == LEDGER:
        return [run / "run.sqlite"]
    if target == SEGMENT:
        return sorted(path for path in (run / "traces").iterdir() if path.is_file())
    newest = list_checkpoints(run / "checkpoints")[-1:]
    return sorted(path for checkpoint in newest for path in checkpoint.rglob("*") if path.is_file())
