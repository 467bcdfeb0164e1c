"""Reads the ledger of a finished run with SQL of its own, and compares it with what the trainers wrote in their logs.

Nothing here uses `ramify`: a mistake of its audit or of its tables' readers is not repeated. Tokens are stored as one
integer, term * 65536 + incarnation, and printed as TERM.INCARNATION, or INCARNATION in term 0.
"""

import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

# Each query returns the rows that must not exist.
FORBIDDEN_ROWS = {
    "a group was lost: numbers are not consecutive": """
        SELECT count(*), max(number) FROM groups HAVING count(*) != max(number) + 1 OR min(number) != 0""",
    "a group is neither trained nor dropped": """
        SELECT number, state FROM groups WHERE state NOT IN ('trained', 'dropped')""",
    "a group was trained in a step that is not committed": """
        SELECT number, step FROM groups
        WHERE state = 'trained' AND (step IS NULL OR step >= (SELECT max(version) FROM commits))""",
    "a task was issued twice in one epoch of its source": """
        SELECT source, epoch, task FROM groups GROUP BY source, epoch, task HAVING count(*) > 1""",
    "a trained group has too few or too many attempts": """
        SELECT g.number, g.size FROM groups g LEFT JOIN attempts a ON a.number = g.number
        WHERE g.state = 'trained' GROUP BY g.number HAVING count(a.attempt) != g.size""",
    "an attempt of a trained group is neither trained nor dropped": """
        SELECT a.number, a.attempt, a.state FROM attempts a JOIN groups g ON g.number = a.number
        WHERE g.state = 'trained' AND a.state NOT IN ('trained', 'dropped')""",
    "an attempt was trained without its group": """
        SELECT a.number, a.attempt FROM attempts a LEFT JOIN groups g ON g.number = a.number
        WHERE a.state = 'trained' AND g.state IS NOT 'trained'""",
    "a trained attempt has no stored rollout": """
        SELECT a.number, a.attempt FROM attempts a LEFT JOIN rollouts r ON r.id = a.rollout
        WHERE a.state = 'trained' AND r.id IS NULL""",
    "one rollout counts for two attempts": """
        SELECT rollout FROM attempts WHERE rollout IS NOT NULL GROUP BY rollout HAVING count(*) > 1""",
    "an older trainer committed after a newer one": """
        SELECT a.version, a.incarnation, b.version, b.incarnation FROM commits a, commits b
        WHERE a.version < b.version AND a.incarnation > b.incarnation""",
    "a group was issued under a newer trainer than the one that committed it": """
        SELECT g.number FROM groups g
        JOIN commits c ON c.version = (SELECT min(version) FROM commits WHERE version > g.step)
        WHERE g.state = 'trained' AND g.incarnation > c.incarnation""",
    "a committed step was not served to the trainer that committed it, or with other groups": """
        SELECT b.step, c.incarnation FROM batches b
        JOIN commits c ON c.version = (SELECT min(version) FROM commits WHERE version > b.step)
        LEFT JOIN served s ON s.step = b.step AND s.incarnation = c.incarnation
        WHERE s.members IS NULL OR s.members != b.members""",
    "the database is damaged": "SELECT * FROM pragma_integrity_check WHERE integrity_check != 'ok'",
}


@dataclass(slots=True)
class TrainerLog:
    """What one trainer wrote: its token, the steps it trained, and the versions whose commit was acknowledged to it."""

    token: str
    committed_before: int
    steps: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)


def check_ledger(database: Path) -> list[str]:
    """Return one line for each contradiction in the ledger of a finished run."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        problems = []
        for problem, query in FORBIDDEN_ROWS.items():
            if rows := connection.execute(query).fetchall():
                problems.append(f"{problem}: {rows[:5]}{' ...' if len(rows) > 5 else ''}")
        return [*problems, *_check_batches(connection)]


def _check_batches(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that each committed step has one batch, and that each trained group is in the batch of its step, once."""
    committed = connection.execute("SELECT max(version) FROM commits").fetchone()[0] or 0
    batches = {
        step: msgspec.msgpack.decode(members) for step, members in _select(connection, "step, members", "batches")
    }
    if missing := sorted(set(range(committed)) - set(batches)):
        yield f"committed steps without a batch: {missing}"
    in_batches = Counter((number, step) for step, numbers in batches.items() if step < committed for number in numbers)
    trained = {
        (number, step)
        for number, step, state in _select(connection, "number, step, state", "groups")
        if state == "trained"
    }
    if repeated := sorted(key for key, count in in_batches.items() if count > 1):
        yield f"groups that are twice in a batch (group, step): {repeated[:5]}"
    if len({number for number, _ in in_batches}) != len(in_batches):
        yield "a group is in the batches of two steps"
    if different := sorted(set(in_batches) ^ trained):
        yield f"trained groups and the committed batches differ (group, step): {different[:5]}"


def _select(connection: sqlite3.Connection, columns: str, table: str) -> list[tuple]:
    return connection.execute(f"SELECT {columns} FROM {table}").fetchall()


def read_commits(database: Path) -> list[tuple[int, str, str, str]]:
    """Return version, token, checkpoint directory and digest of each commit, in order."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT version, incarnation, directory, digest FROM commits ORDER BY version")
        return [(version, _format_token(number), directory, digest) for version, number, directory, digest in rows]


def _format_token(number: int) -> str:
    term, incarnation = divmod(number, 65536)
    return f"{term}.{incarnation}" if term else str(incarnation)


def read_trainer_logs(texts: Sequence[str]) -> list[TrainerLog]:
    """Return what each trainer wrote, from the `trainer.log` of every run directory."""
    logs: list[TrainerLog] = []
    for text in texts:
        for line in text.splitlines():
            if match := re.search(r"trainer ranks=\d+ token=(\S+) committed=(\d+)", line):
                logs.append(TrainerLog(match[1], int(match[2])))
            elif match := re.match(r"step=(\d+) loss=", line):
                logs[-1].steps.append(int(match[1]))
            elif match := re.match(r"checkpoint=(\d+) seconds=", line):
                logs[-1].commits.append(int(match[1]))
    return logs


def check_trainer_logs(logs: Sequence[TrainerLog], commits: Sequence[tuple[int, str, str, str]]) -> Iterator[str]:
    """Check that each commit was acknowledged to at most one trainer, which is the one that the ledger names.

    The last lines of a killed trainer may be missing. All others must be there: a trainer that goes on after a commit
    has written it, and each committed step was trained by the trainer that committed it, after its last commit.
    """
    counted = {version: token for version, token, _, _ in commits}
    tokens = [log.token for log in logs]
    if len(set(tokens)) != len(tokens):
        yield f"two trainers have the same token: {tokens}"
    for log in logs:
        for version in log.commits:
            if (winner := counted.get(version)) != log.token:
                yield f"version {version} was acknowledged to trainer {log.token}; in the ledger it belongs to {winner}"
        own = [version for version, token in counted.items() if token == log.token]
        earlier = [version for version, token in counted.items() if _order(token) < _order(log.token)]
        if log.committed_before != max(earlier, default=0):
            yield f"trainer {log.token} continued version {log.committed_before}, not the last one before it"
        if missing := sorted(set(own[:-1]) - set(log.commits)):
            yield f"trainer {log.token} has not written its commits {missing}"
        if own and (missing_steps := sorted(set(range(log.committed_before, own[-1] - 1)) - set(log.steps))):
            yield f"trainer {log.token} committed version {own[-1]} without training steps {missing_steps}"
    if unknown := sorted(set(counted.values()) - set(tokens)):
        yield f"commits of trainers that wrote nothing: {unknown}"


def _order(token: str) -> tuple[int, int]:
    term, _, incarnation = token.rpartition(".")
    return int(term or 0), int(incarnation)


def check_checkpoints(shared: Path, commits: Sequence[tuple[int, str, str, str]]) -> Iterator[str]:
    """Check that the last committed checkpoint is there with the committed content, under the name of its writer."""
    for _, token, directory, _ in commits:
        if not directory.endswith(f"-{token}"):
            yield f"trainer {token} committed {directory}, which is the directory of another one"
    version, _, directory, digest = commits[-1]
    manifest = shared / "checkpoints" / directory / "checkpoint.json"
    if not manifest.is_file() or hashlib.sha256(manifest.read_bytes()).hexdigest() != digest:
        yield f"the checkpoint of version {version} is not the one that was committed"


def check_heads(shared: Path, commits: Sequence[tuple[int, str, str, str]]) -> Iterator[str]:
    """Check that the terms form one chain, that every older one is sealed, and that no commit is of an unknown one."""
    terms = sorted(int(path.name) for path in (shared / "term").iterdir())
    if terms != list(range(len(terms))):
        yield f"the terms are {terms}"
    for term in terms:
        entries = sorted((shared / "ledger" / str(term)).glob("*"), key=lambda path: int(path.name))
        seals = [int(path.name) for path in entries if path.read_bytes() == b"sealed"]
        if [int(path.name) for path in entries] != list(range(len(entries))):
            yield f"term {term} lacks an entry"
        if term == terms[-1] and seals:
            yield f"the newest term {term} is sealed"
        elif term != terms[-1] and seals != [len(entries) - 1]:
            yield f"term {term} has {len(entries)} entries and seals {seals}; expected one seal, at its end"
        elif term != terms[-1]:
            base = json.loads((shared / "term" / str(term + 1)).read_text())
            if seals[0] and base != [term, seals[0] - 1]:
                yield f"term {term + 1} continues {base}, not the last entry of term {term}"
    if unknown := sorted({_order(token)[0] for _, token, _, _ in commits} - set(terms)):
        yield f"commits of unknown terms {unknown}"


def _read_logs(runs: Sequence[Path], pattern: str) -> list[str]:
    return [path.read_text(errors="replace") for run in runs for path in sorted((run / "logs").glob(pattern))]


def check_run(run: Path, shared: Path, head_directories: Sequence[Path]) -> list[str]:
    """Return all contradictions in what a finished run has left in the run directories of all its heads."""
    commits = read_commits(run / "run.sqlite")
    logs = read_trainer_logs(_read_logs(head_directories, "trainer.log"))
    print(f"{len(commits)} commits by {len({token for _, token, _, _ in commits})} trainers; {len(logs)} were started")
    ended = Counter(
        re.findall(r"rollout ended id=(\d+\.\d+) ", "\n".join(_read_logs(head_directories, "env-train-*.log")))
    )
    print(f"{len(ended)} rollouts ended, {sum(count > 1 for count in ended.values())} of them more than once")
    return [
        *check_ledger(run / "run.sqlite"),
        *check_trainer_logs(logs, commits),
        *check_checkpoints(shared, commits),
        *check_heads(shared, commits),
    ]
