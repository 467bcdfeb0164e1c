"""Which head of a run counts, decided by storage that creates a name at most once.

    term/<k>        a head began term k of the run; says after which entry of which term it continues
    ledger/<k>/<n>  entry n of term k: what head k committed, or a seal

The entries of a term have consecutive numbers. A new head first *seals* the newest term: it creates the next free
entry as a seal, so that the old head, if it still runs, can commit nothing more. Then it creates the next term, which
continues after the last entry before the seal. Both steps are single creations, so a new head may fail or be paused
between them, and of two new heads one wins. An entry counts if it lies on the chain of terms that the newest one
continues. When an entry was created, every later head continues after it or after a later one.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import uuid4

import msgspec

from ramify.core.errors import ProcessReplaced, StorageFailed
from ramify.core.files import fsync_path, mkdir_and_fsync, read_bytes, write_and_fsync
from ramify.core.watchdog import watch_storage
from ramify.run.fencing.token import FencingToken


class DirectoryStore:
    """A `CreateOnceStore` in a directory that all machines share. Names may contain slashes. Methods raise OSError.

    A file is written in full under a name of its own, then linked to its final name: `link` fails if that name exists,
    also on network file systems, where opening a file exclusively and then writing to it could leave half of it behind.
    If the answer to `link` was lost, the number of links of the own file tells whether it was made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self, name: str, data: bytes) -> bool:
        """Create `name` with all of `data`, durably; return False if it exists, without changing it.

        A name that exists is on disk, too, when this returns: a creation that failed halfway may have made it.
        """
        path = self.directory / name
        mkdir_and_fsync(path.parent)
        partial_path = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            write_and_fsync(partial_path, data)
            try:
                with watch_storage(path):
                    os.link(partial_path, path)
            except OSError:
                if partial_path.stat().st_nlink != 2:
                    if not path.exists():
                        raise  # another failure than an existing name
                    fsync_path(path)
                    self._fsync_directories(path)
                    return False
            self._fsync_directories(path)
            return True
        finally:
            with watch_storage(path):
                partial_path.unlink(missing_ok=True)

    def _fsync_directories(self, path: Path) -> None:
        """Bring the names of a file and of the directories above it to disk, up to this store."""
        for parent in path.parents:
            fsync_path(parent)
            if parent == self.directory:
                return

    def read(self, name: str) -> bytes | None:
        """Return the data of `name`; None if it does not exist."""
        try:
            return read_bytes(self.directory / name)
        except FileNotFoundError:
            return None


SEAL = b"sealed"


class CreateOnceStore(Protocol):
    """Shared storage in which of several creations of one name exactly one succeeds."""

    def create(self, name: str, data: bytes) -> bool:
        """Create `name` with all of `data`, durably; return False if it exists, without changing it.

        A name that exists is durable, too, when this returns.
        """
        ...

    def read(self, name: str) -> bytes | None:
        """Return the data of `name`; None if it does not exist."""
        ...


class LogPosition(NamedTuple):
    """One entry of the head log."""

    term: int
    number: int


class HeadLog:
    """The terms and entries of one run in `store`."""

    def __init__(self, store: CreateOnceStore) -> None:
        self._store = store

    def claim_term(self, *, keep_history: bool = True) -> tuple[FencingToken, LogPosition | None]:
        """Take over the run. Return the token of the new head, and the entry that it continues after, if any.

        Without `keep_history` the run begins again: the entries of earlier terms do not count any more. Raises
        ProcessReplaced if another head took over at the same time.
        """
        newest = self.find_newest_term()
        base = None if newest is None else self._seal(newest)
        base = base if keep_history else None
        token = FencingToken(0 if newest is None else newest + 1)
        if not self._store.create(_term_name(token.term), msgspec.json.encode(base)):
            raise ProcessReplaced(f"another head began term {token.term} at the same time; this one must exit")
        return token, base

    def append(self, position: LogPosition, data: bytes) -> None:
        """Append what the head of `position.term` has committed; it counts once this returns.

        If the outcome is unknown, because the storage did not answer, the same call may be repeated. Every head must
        write different `data`. Raises ProcessReplaced if another head has taken over.
        """
        if data == SEAL:
            raise ValueError("an entry must differ from a seal")
        name = _entry_name(position)
        if not self._store.create(name, data) and self._store.read(name) != data:
            raise _make_ended_error(position)

    def check_not_ended(self, position: LogPosition) -> None:
        """Raise ProcessReplaced if a newer head has ended the term at `position`, the next entry of its head."""
        if self._store.read(_entry_name(position)) == SEAL:
            raise _make_ended_error(position)

    def read_entry(self, position: LogPosition) -> bytes | None:
        """Return the data of one entry; None if it does not exist."""
        return self._store.read(_entry_name(position))

    def find_newest_term(self) -> int | None:
        """Return the newest term; None for a run that no head has taken over."""
        term = -1
        while self._store.read(_term_name(term + 1)) is not None:
            term += 1
        return term if term >= 0 else None

    def read_base(self, term: int) -> LogPosition | None:
        """Return the entry after which a term continues; None if it begins the run."""
        if (data := self._store.read(_term_name(term))) is None:
            raise StorageFailed(f"{_term_name(term)} is missing from the shared storage; restore it")
        return msgspec.json.decode(data, type=LogPosition | None)

    def iter_entries(self) -> Iterator[tuple[LogPosition, bytes]]:
        """Yield the entries that count, in order: those on the chain of the newest term.

        Raises StorageFailed if one is missing that a later term continues.
        """
        terms: list[tuple[int, LogPosition | None]] = []  # with the last entry that counts, newest term first
        term, last = self.find_newest_term(), None
        while term is not None:
            terms.append((term, last))
            last = self.read_base(term)
            term = None if last is None else last.term
        for term, last in reversed(terms):
            position = LogPosition(term, 0)
            for position, data in self._iter_term(term):
                if data == SEAL or (last is not None and position > last):
                    break
                yield position, data
                position = LogPosition(term, position.number + 1)
            if last is not None and position <= last:
                raise StorageFailed(f"{_entry_name(position)} is missing from the shared storage; restore it")

    def _seal(self, term: int) -> LogPosition | None:
        """Let the term end at its next free entry. Return the last entry before it, of this or an earlier term."""
        number = sum(data != SEAL for _, data in self._iter_term(term))  # reading is cheaper than trying to create
        while not self._store.create(_entry_name(LogPosition(term, number)), SEAL):
            if self._store.read(_entry_name(LogPosition(term, number))) == SEAL:
                break  # by another head that has not begun the next term yet
            number += 1
        return LogPosition(term, number - 1) if number else self.read_base(term)

    def _iter_term(self, term: int) -> Iterator[tuple[LogPosition, bytes]]:
        position = LogPosition(term, 0)
        while (data := self._store.read(_entry_name(position))) is not None:
            yield position, data
            position = LogPosition(term, position.number + 1)


def _make_ended_error(position: LogPosition) -> ProcessReplaced:
    return ProcessReplaced(f"term {position.term} was ended at entry {position.number}: a newer head took over")


def _term_name(term: int) -> str:
    return f"term/{term}"


def _entry_name(position: LogPosition) -> str:
    return f"ledger/{position.term}/{position.number}"
