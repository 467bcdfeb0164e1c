"""Random groups of attempts, and what the words of the design say about them, computed the slow way.

A group is planned as plain data first (`Attempt`); the traces under test are built from the plan, and so is everything
that is expected of their forest. Nothing here uses the code that merges, lays out, cuts or packs. Paths are compared
through one naive trie (`Paths`) that numbers every distinct path of (token, image) pairs it is shown.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
from hypothesis import strategies as st

from ramify.trace import AnnotatedTrace, Annotation, Forest, Media, MediaRef, Message, PolicyVersion, Trace, VersionSpan

COMPONENTS = ("rl", "ce", "ref_kl", "kl")
NUMBERS = ("logprob", "advantage", *COMPONENTS, "ref_logprob")

Run = tuple[int, int, bytes]  # an image's placeholders [start, stop) in a node, and the image
Key = tuple[int, object]  # what decides a merge: the token, and at a placeholder the image and its whole run
Call = tuple[str, int]  # (trace, node)


# -- the plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    parent: int
    tokens: tuple[int, ...]
    sampled: tuple[int, int] = (0, 0)
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    images: tuple[Run, ...] = ()
    trainable: bool = True

    def merge_keys(self) -> list[Key]:
        keys: list[Key] = [(token, None) for token in self.tokens]
        for start, stop, data in self.images:
            run = (data, self.tokens[start:stop])
            for index in range(start, stop):
                keys[index] = (self.tokens[index], run)
        return keys

    def version(self, offset: int) -> PolicyVersion | None:
        """The weights that sampled a token, None where none is known."""
        index = offset - self.sampled[0]
        for run in self.versions:
            if 0 <= index < run.count:
                return PolicyVersion(run.policy, run.incarnation, run.step)
            index -= run.count
        return None


@dataclass(frozen=True)
class Attempt:
    name: str
    nodes: tuple[Planned, ...]
    notes: tuple[Annotation, ...]
    temperature: float = 1.0
    env: str = ""

    def sample(self) -> AnnotatedTrace:
        trace = Trace(id=self.name)
        for node in self.nodes:
            trace.graph.add_node(
                node.parent,
                Message("assistant" if node.sampled[1] else "user"),
                np.array(node.tokens, np.int32),
                sampled_span=node.sampled,
                logprobs=node.logprobs,
                versions=node.versions,
                media=[
                    MediaRef(part, trace.add_media(Media.from_bytes(data, "image/png")), start, stop)
                    for part, (start, stop, data) in enumerate(node.images)
                ],
                trainable=node.trainable,
            )
        return AnnotatedTrace(trace, self.notes, self.temperature, self.env)

    def path(self, node: int) -> list[int]:
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.nodes[node].parent
        return nodes[::-1]

    def depth(self, node: int) -> int:
        """Tokens on the path before the node."""
        return sum(len(self.nodes[above].tokens) for above in self.path(node)[:-1])

    def leaves(self) -> list[int]:
        continued = {node.parent for node in self.nodes}
        return [node for node in range(len(self.nodes)) if node not in continued]

    def values(self, note: Annotation) -> list[tuple[int, dict[str, float]]]:
        """(offset in the node, advantage and weights) of each trained token of an annotation."""
        start, stop = note.span or self.nodes[note.node].sampled
        columns = {name: np.broadcast_to(getattr(note, name), stop - start) for name in ("advantage", *COMPONENTS)}
        columns["ref_logprob"] = np.broadcast_to(
            np.nan if note.ref_logprobs is None else note.ref_logprobs, stop - start
        )
        rows = [{name: float(column[i]) for name, column in columns.items()} for i in range(stop - start)]
        return [(start + i, row) for i, row in enumerate(rows) if any(row[name] for name in COMPONENTS)]


# -- what is expected of it ----------------------------------------------------------------------------------------


class Paths:
    """A naive trie: equal paths have equal numbers; 0 is the path of no tokens."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Key], int] = {}
        self.parent = [0]
        self.key: list[Key] = [(-1, None)]

    def step(self, path: int, key: Key) -> int:
        number = self._numbers.setdefault((path, key), len(self.parent))
        if number == len(self.parent):
            self.parent.append(path)
            self.key.append(key)
        return number

    def up(self, path: int) -> list[int]:
        """The path and all its beginnings but the empty one."""
        prefixes: list[int] = []
        while path:
            prefixes.append(path)
            path = self.parent[path]
        return prefixes


class Entry(NamedTuple):
    """One trained token: whose it is, the whole path up to and with it, and every number that goes with it."""

    trace: str
    node: int
    path: int
    token: int
    version: PolicyVersion | None
    env: str
    numbers: bytes  # NUMBERS and temperature, float32, bit by bit


def expected(
    attempts: Iterable[Attempt],
    paths: Paths,
    seq_len: int | None = None,
    overlong: Literal["drop", "cut"] = "drop",
) -> tuple[Counter[Entry], Counter[Call], int]:
    """The entries the words ask for, the calls dropped as too long, and the number of entries cut off."""
    entries: Counter[Entry] = Counter()
    too_long: Counter[Call] = Counter()
    cut = 0
    for attempt in attempts:
        trained = {note.node: attempt.values(note) for note in attempt.notes}
        fitting = _on_fitting_branch(attempt, trained, seq_len) if seq_len and overlong == "drop" else set(trained)
        path_numbers = _places(attempt, paths)
        for number, rows in trained.items():
            node, depth = attempt.nodes[number], attempt.depth(number)
            if rows and number not in fitting:
                too_long[attempt.name, number] += 1
                continue
            for offset, row in rows:
                if overlong == "cut" and seq_len and depth + offset >= seq_len:
                    cut += 1
                    continue
                start, stop = node.sampled
                on_policy = row["rl"] or row["ref_kl"] or row["kl"]
                logprob = node.logprobs[offset - start] if on_policy and start <= offset < stop else np.nan
                numbers = [logprob, *(row[name] for name in NUMBERS[1:]), attempt.temperature]
                entries[
                    Entry(
                        attempt.name,
                        number,
                        path_numbers[number][offset],
                        node.tokens[offset],
                        node.version(offset) if on_policy else None,
                        attempt.env,
                        np.array(numbers, np.float32).tobytes(),
                    )
                ] += 1
    return entries, too_long, cut


def _on_fitting_branch(attempt: Attempt, trained: dict[int, list[tuple[int, Any]]], seq_len: int) -> set[int]:
    """Nodes on some root-to-leaf path whose last trained token is within `seq_len`."""
    nodes: set[int] = set()
    for leaf in attempt.leaves():
        path = attempt.path(leaf)
        ends = [attempt.depth(node) + trained[node][-1][0] + 1 for node in path if trained.get(node)]
        if max(ends, default=0) <= seq_len:
            nodes.update(path)
    return nodes


def _places(attempt: Attempt, paths: Paths) -> list[list[int]]:
    """For each node the numbers of the paths that end at each of its tokens."""
    numbers: list[list[int]] = []
    ends: list[int] = []
    for node in attempt.nodes:
        number = ends[node.parent] if node.parent >= 0 else 0
        row: list[int] = []
        for key in node.merge_keys():
            number = paths.step(number, key)
            row.append(number)
        numbers.append(row)
        ends.append(number)
    return numbers


# -- what a forest says --------------------------------------------------------------------------------------------


def parents(forest: Forest) -> list[int]:
    """The token before each token on its path, read off the depths alone: in depth-first order they spell the tree."""
    path: list[int] = []
    parent_tokens: list[int] = []
    for index, depth in enumerate(forest.position_ids.tolist()):
        del path[depth:]
        assert len(path) == depth, f"token {index} is {depth} deep below a path of {len(path)}"
        parent_tokens.append(path[-1] if path else -1)
        path.append(index)
    return parent_tokens


def leaves(forest: Forest) -> int:
    """How many paths there are."""
    return len(forest) - len({parent for parent in parents(forest) if parent >= 0})


def ancestors(forest: Forest) -> np.ndarray:
    """[query, key]: key is an ancestor of query or query itself."""
    mask = np.zeros((len(forest), len(forest)), bool)
    for index, parent in enumerate(parents(forest)):
        if parent >= 0:
            mask[index] = mask[parent]
        mask[index, index] = True
    return mask


def paths_of(forest: Forest, paths: Paths) -> list[int]:
    """For each token the number of the path that ends there."""
    images: dict[int, object] = {}
    for item in forest.media:
        run = (item.media.data, tuple(forest.token_ids[item.start : item.stop].tolist()))
        images |= dict.fromkeys(range(item.start, item.stop), run)
    numbers: list[int] = []
    for index, parent in enumerate(parents(forest)):
        key = (int(forest.token_ids[index]), images.get(index))
        numbers.append(paths.step(numbers[parent] if parent >= 0 else 0, key))
    return numbers


def entries_of(forest: Forest, paths: Paths) -> Counter[Entry]:
    """The forest's targets, each checked to come right after its source on its path."""
    path_numbers, parent_tokens = paths_of(forest, paths), parents(forest)
    targets = forest.targets
    entries: Counter[Entry] = Counter()
    for i in range(len(targets)):
        index, call = int(targets.token_index[i]), forest.calls[int(targets.call[i])]
        assert targets.logits_index[i] == parent_tokens[index] >= 0
        version = int(targets.version[i])
        numbers = [getattr(targets, name)[i] for name in NUMBERS]
        entries[
            Entry(
                forest.traces[call["trace"]],
                int(call["node"]),
                path_numbers[index],
                int(targets.token[i]),
                forest.versions[version] if version >= 0 else None,
                forest.envs[call["env"]],
                np.array([*numbers, call["temperature"]], np.float32).tobytes(),
            )
        ] += 1
    return entries


def flat_tokens(attempts: Iterable[Attempt]) -> int:
    """Tokens of every trained path on its own: from its root to the last trained token that nothing trained follows."""
    total = 0
    for attempt in attempts:
        rows = {note.node: attempt.values(note) for note in attempt.notes}
        trained = [node for node, values in rows.items() if values]
        inner = {above for node in trained for above in attempt.path(node)[:-1]}
        total += sum(attempt.depth(node) + rows[node][-1][0] + 1 for node in trained if node not in inner)
    return total


def calls_of(forest: Forest) -> list[Call]:
    """The model calls that `calls` lists, in its order."""
    return [(forest.traces[row["trace"]], int(row["node"])) for row in forest.calls]


def check_layout(forest: Forest) -> None:
    """What holds for every forest, grown, cut or packed: mask rule, segments, whole image runs, one row per call."""
    assert np.array_equal(forest.build_attention_mask(), ancestors(forest))
    assert forest.num_attention_pairs == np.count_nonzero(forest.build_attention_mask())
    calls = calls_of(forest)
    assert len(set(calls)) == len(calls)
    assert set(forest.targets.call.tolist()) == set(range(len(calls)))
    up = parents(forest)
    table = forest.segments.tolist()
    assert sum(length for _, length, _, _, _ in table) == forest.num_tokens
    for start, length, depth, parent, last in table:
        above = table[parent][0] + table[parent][1] - 1 if parent >= 0 else -1
        assert up[start : start + length] == [above, *range(start, start + length - 1)]
        assert forest.position_ids[start] == depth
        assert forest.subtree_end[start] == table[last - 1][0] + table[last - 1][1]
    for item in forest.media:
        assert 0 <= item.start < item.stop <= len(forest)
        assert up[item.start + 1 : item.stop] == list(range(item.start, item.stop - 1))
    assert {forest.token_ids.dtype, forest.position_ids.dtype, forest.subtree_end.dtype} == {np.dtype(np.int32)}


# -- random groups -------------------------------------------------------------------------------------------------


@dataclass
class Size:
    traces: int = 5
    nodes: int = 9
    fewest: int = 1
    tokens: int = 4
    vocab: int = 3
    images: bool = True
    parting: float = 0.4  # how often a node does not continue the one before it
    temperatures: tuple[float, ...] = (1.0, 0.7)
    logprobs: tuple[float, float] = (-8.0, 0.0)
    placeholders: Sequence[int] = field(default_factory=lambda: (0, 9))  # 0 is an ordinary token too


def groups(**size: Any) -> st.SearchStrategy[list[Attempt]]:
    """Groups of attempts that hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(lambda rng: group(rng, Size(**size)))


def group(rng: Random, size: Size, name: str = "t") -> list[Attempt]:
    """Some attempts at one prompt; they share beginnings because the vocabulary is tiny, and some are twins."""
    attempts: list[Attempt] = []
    prompt = _context(rng, size, -1)
    for number in range(rng.randint(1, size.traces)):
        if attempts and rng.random() < 0.3:
            nodes = attempts[rng.randrange(len(attempts))].nodes
            nodes = nodes[: rng.randint(1, len(nodes))] if rng.random() < 0.5 else nodes
        else:
            nodes = _tree(rng, size, prompt)
        notes = _notes(rng, f"{name}{number}", nodes)
        # ref_kl and kl are defined at temperature 1 only (design, section 7)
        hot = any(note.needs_reference for note in notes)
        temperature = 1.0 if hot else rng.choice(size.temperatures)
        attempts.append(Attempt(f"{name}{number}", nodes, notes, temperature, rng.choice(["", "maths"])))
    return attempts


def _tree(rng: Random, size: Size, prompt: Planned) -> tuple[Planned, ...]:
    """One attempt: as a rule it begins with the prompt; replies, context, forks, retries and roots follow."""
    nodes = [prompt if rng.random() < 0.9 else _context(rng, size, -1)]
    for number in range(1, rng.randint(size.fewest, size.nodes)):
        parent = rng.randint(-1, number - 1) if rng.random() < size.parting else number - 1
        kind = rng.choice(["reply", "reply", "reply", "reply", "context", "context", "context", "retry"])
        if kind == "retry":  # the same again, sampled anew
            twin = rng.choice(nodes)
            nodes.append(replace(twin, logprobs=_logprobs(rng, size, len(twin.logprobs))))
        else:
            nodes.append(_reply(rng, size, parent) if kind == "reply" else _context(rng, size, parent))
    return tuple(nodes)


def _reply(rng: Random, size: Size, parent: int) -> Planned:
    """Template tokens, sampled tokens, and perhaps template tokens again."""
    lead, sampled, tail = rng.choice([0, 0, 1]), rng.randint(0, size.tokens), rng.choice([0, 0, 1])
    return Planned(
        parent,
        _tokens(rng, size, lead + sampled + tail),
        (lead, lead + sampled),
        _logprobs(rng, size, sampled),
        _versions(rng, sampled),
        trainable=rng.random() > 0.15,
    )


def _context(rng: Random, size: Size, parent: int) -> Planned:
    """A message that was not sampled: text, sometimes empty, sometimes with one or two image placeholders."""
    tokens, images = list(_tokens(rng, size, rng.randint(0, size.tokens))), list[Run]()
    for _ in range(rng.choice([0, 0, 0, 1, 2]) if size.images else 0):
        start = len(tokens) if images else rng.randint(0, len(tokens))
        run = [rng.choice(size.placeholders) for _ in range(rng.randint(1, 3))]
        tokens[start:start] = run
        images.append((start, start + len(run), rng.choice([b"cat", b"dog"])))
    return Planned(parent, tuple(tokens), images=tuple(images))


def _tokens(rng: Random, size: Size, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(size.vocab) for _ in range(count))


def _logprobs(rng: Random, size: Size, count: int) -> tuple[float, ...]:
    return tuple(float(np.float32(rng.uniform(*size.logprobs))) for _ in range(count))


def _versions(rng: Random, count: int) -> tuple[VersionSpan, ...]:
    if not count or rng.random() < 0.3:
        return ()
    first = rng.randint(0, count)
    step = rng.randint(0, 2)
    return VersionSpan("policy", 0, step, first), VersionSpan("policy", rng.randint(0, 1), step + 1, count - first)


def _notes(rng: Random, name: str, nodes: Sequence[Planned]) -> tuple[Annotation, ...]:
    """Annotations of some of the nodes, in any order."""
    attempt = Attempt(name, tuple(nodes), ())
    notes: list[Annotation] = []
    for number, node in enumerate(nodes):
        lead = 0 if attempt.depth(number) else 1  # a root's first token has nothing before it
        a, b = node.sampled
        if b > max(a, lead) and node.trainable and rng.random() < 0.8:
            span = (max(a, lead), b) if a < lead or rng.random() < 0.2 else None
            notes.append(_on_policy(rng, name, number, span, b - max(a, lead)))
        elif rng.random() < 0.25:
            low = max([stop for _, stop, _ in node.images] + [lead])
            if low < len(node.tokens):
                start = rng.randint(low, len(node.tokens) - 1)
                ce = _value(rng, len(node.tokens) - start, (0.5, 1.0))
                notes.append(Annotation(name, number, (start, len(node.tokens)), rl=0.0, ce=ce))
    rng.shuffle(notes)
    return tuple(notes)


def _on_policy(rng: Random, name: str, node: int, span: tuple[int, int] | None, count: int) -> Annotation:
    kind = rng.choice(["rl", "rl", "rl+ce", "rl+ref_kl", "rl+kl", "ce"])
    has_reference = kind.endswith("kl")
    return Annotation(
        name,
        node,
        span,
        advantage=_value(rng, count, (-1.0, -0.25, 0.5, 2.0)),
        rl=_value(rng, count, (0.0, 1.0, 1.0, 0.5)) if "rl" in kind else 0.0,
        ce=_value(rng, count, (1.0, 0.125)) if "ce" in kind else 0.0,
        ref_kl=_value(rng, count, (0.0, 0.5)) if "ref_kl" in kind else 0.0,
        ref_logprobs=_value(rng, count, (-1.0, -3.0)) if has_reference else None,
        kl=_value(rng, count, (0.0, 0.25)) if kind == "rl+kl" else 0.0,
    )


def _value(rng: Random, count: int, choices: Sequence[float]) -> Any:
    """One number for the span, or one per token."""
    if rng.random() < 0.5:
        return rng.choice(choices)
    return np.array([rng.choice(choices) for _ in range(count)], np.float32)
