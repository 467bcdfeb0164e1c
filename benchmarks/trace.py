"""The trace and the forest: what a rollout costs to record, keep, send and lay out.

The same synthetic rollouts are recorded by Ramify and, in a second interpreter, by `verifiers` 0.4.0. Balancing is
compared with a textbook Karmarkar-Karp partition. Targets: 400 turns in under 0.1 s and linear, 12 bytes a token, 5 ms
to encode and decode 200k tokens, 50 ms to lay out 128 rollouts of 8k tokens and to balance 512 packs.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _check import Row, competitor, finish, median, parser
from _karmarkar_karp import karmarkar_karp
from _synthetic import MESSAGE_TOKENS, chain, digest, path, prompt, tree
from _synthetic import Turn as SyntheticTurn

from ramify.trace import (
    AnnotatedTrace,
    Annotation,
    Message,
    MessageSpan,
    ModelCall,
    Trace,
    TraceBuilder,
    Turn,
    Usage,
    VersionSpan,
    balance_packs,
    build_forest,
    decode_trace,
    encode_trace,
    pack_trees,
    split_forest,
)

APPEND_TURNS = (50, 200, 400)
GROUPS, GROUP_SIZE, TOKENS, SHARED, CALLS = 8, 16, 8192, 2048, 8
BUDGET = 32768
PACKS, RANKS = 512, 32


def turn_of(turns: Sequence[SyntheticTurn], index: int) -> Turn:
    """The call as the engine saw it, all of the prompt and every message of it given."""
    ids = np.array(prompt(turns, index), np.int32)
    spans: list[MessageSpan] = []
    for depth, before in enumerate(path(turns, index)):
        start = 2 * MESSAGE_TOKENS * depth
        middle, stop = start + MESSAGE_TOKENS, start + 2 * MESSAGE_TOKENS
        spans.append(MessageSpan(Message("user", turns[before].user), middle, (start, middle)))
        if before != index:
            spans.append(MessageSpan(Message("assistant", turns[before].reply), stop, (middle, stop)))
    return Turn(
        call=ModelCall(
            f"call-{index}", "policy", "policy", {"temperature": 1.0}, "stop", Usage(len(ids), MESSAGE_TOKENS)
        ),
        prompt_ids=ids,
        spans=spans,
        reply=Message("assistant", turns[index].reply),
        reply_ids=np.array(turns[index].sampled, np.int32),
        logprobs=np.array(turns[index].logprobs, np.float32),
        versions=[VersionSpan("policy", 0, index, MESSAGE_TOKENS)],
    )


def record(turns: Sequence[SyntheticTurn]) -> tuple[Trace, float]:
    """The trace of these turns, and the CPU seconds spent attaching them."""
    trace = Trace(id="synthetic")
    builder = TraceBuilder(trace)
    seconds = 0.0
    for index in range(len(turns)):
        turn = turn_of(turns, index)
        started = time.process_time()
        builder.add_turn(turn)
        seconds += time.process_time() - started
    return trace, seconds


def heap_bytes_per_token(turns: Sequence[SyntheticTurn]) -> float:
    gc.collect()
    tracemalloc.start()
    trace, _ = record(turns)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / trace.graph.tokens.size


def milliseconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    kept = work()
    elapsed = time.perf_counter() - started
    del kept
    return 1e3 * elapsed


def verify(turns: Sequence[SyntheticTurn], trace: Trace) -> None:
    """The comparison is void unless every branch is exactly what the engine saw and sampled."""
    parents = {turn.parent for turn in turns}
    leaves = [index for index in range(len(turns)) if index not in parents]
    for leaf, branch in zip(leaves, trace.flatten(), strict=True):
        if branch.token_ids.tolist() != (prompt(turns, leaf) + turns[leaf].sampled).tolist():
            raise AssertionError("a recorded branch is not the tokens of the synthetic rollout")
        if branch.logprobs[branch.sampled_mask][-MESSAGE_TOKENS:].tolist() != turns[leaf].logprobs.tolist():
            raise AssertionError("a recorded branch does not have the logprobs of the synthetic rollout")


def groups(rng: np.random.Generator) -> list[list[AnnotatedTrace]]:
    """Groups of attempts that share a prompt; half of what follows it is sampled, in several calls."""
    each = (TOKENS - SHARED) // CALLS
    found: list[list[AnnotatedTrace]] = []
    for group in range(GROUPS):
        shared = rng.integers(0, 50_000, SHARED, np.int32)
        samples: list[AnnotatedTrace] = []
        for attempt in range(GROUP_SIZE):
            trace = Trace(id=f"{group}-{attempt}")
            node = trace.graph.add_node(-1, Message("user", "task"), shared)
            notes: list[Annotation] = []
            for call in range(CALLS):
                ids = rng.integers(0, 50_000, each, np.int32)
                node = trace.graph.add_node(
                    node,
                    Message("assistant", "reply"),
                    ids,
                    sampled_span=(0, each // 2),
                    logprobs=rng.random(each // 2, np.float32),
                    versions=[VersionSpan("policy", 0, call, each // 2)],
                    call=ModelCall(f"{call}"),
                )
                notes.append(Annotation(trace.id, node, advantage=float(rng.normal())))
            samples.append(AnnotatedTrace(trace, tuple(notes)))
        found.append(samples)
    return found


def lay_out(batch: Sequence[Sequence[AnnotatedTrace]]) -> tuple[int, int]:
    """From traces to rows: merge, cut, pack. Returns the numbers of rows and targets."""
    pieces = [piece for group in batch for piece in split_forest(build_forest(group, seq_len=TOKENS), BUDGET)]
    rows = pack_trees(pieces, BUDGET, pad_to_multiple=128)
    return len(rows), sum(len(row.targets) for row in rows)


def balance_rows(rng: np.random.Generator) -> list[Row]:
    """Time, and the heaviest rank relative to Karmarkar-Karp's, for costs of several shapes."""
    lengths = rng.uniform(0.1, 1.0, PACKS)
    shapes = {
        "uniform": lengths,
        "lognormal": rng.lognormal(0.0, 1.0, PACKS),
        "bimodal": np.where(rng.random(PACKS) < 0.1, 10.0, 1.0) * lengths,
        "quadratic": lengths + 4.0 * lengths**2,
    }
    rows: list[Row] = []
    for name, costs in shapes.items():
        table = balance_packs(costs, RANKS)
        load = np.append(costs, 0.0)[table].sum(axis=1).max()
        reference = max(sum(costs[i] for i in part) for part in karmarkar_karp(costs.tolist(), RANKS))
        rows.append(Row(f"balance, heaviest rank, {name}", load, reference, "cost", 1.02 * reference))
    ours = median(lambda: milliseconds(lambda: balance_packs(shapes["quadratic"], RANKS)))
    theirs = median(lambda: milliseconds(lambda: karmarkar_karp(shapes["quadratic"].tolist(), RANKS)))
    return [Row(f"balance {PACKS} packs over {RANKS} ranks", ours, theirs, "ms", 50.0), *rows]


def main() -> int:
    args = parser(__doc__, shown_flags=["--verifiers-python"]).parse_args()
    theirs = competitor(
        args.verifiers_python, "_verifiers_trace.py", "verifiers==0.4.0", "--verifiers-python", args.check
    )
    turns, forked = chain(max(APPEND_TURNS)), tree()
    if theirs is not None and theirs["data"] != {"chain": digest(turns), "tree": digest(forked)}:
        raise AssertionError("the two sides did not record the same rollouts")

    def reference(*keys: str) -> float | None:
        found: Any = theirs
        for key in keys:
            found = None if found is None else found[key]
        return found

    append = {count: median(lambda count=count: record(turns[:count])[1]) for count in APPEND_TURNS}
    heap = median(lambda: heap_bytes_per_token(turns[:200]))
    trace, branching = record(turns)[0], record(forked)[0]
    verify(turns, trace)
    verify(forked, branching)
    wire = len(encode_trace(trace)) / trace.graph.tokens.size
    codec = median(lambda: milliseconds(lambda: decode_trace(encode_trace(trace))))
    flat = median(lambda: milliseconds(branching.flatten))
    rng = np.random.default_rng(0)
    batch = groups(rng)
    layout = median(lambda: milliseconds(lambda: lay_out(batch)))
    rows = [
        Row("append 50 turns, CPU", append[50], reference("append_cpu_s", "50"), "s"),
        Row("append 200 turns, CPU", append[200], reference("append_cpu_s", "200"), "s"),
        Row("append 400 turns, CPU", append[400], reference("append_cpu_s", "400"), "s", 0.1),
        Row("append 400 turns / 200 turns", append[400] / append[200], None, "ratio", 2.5),
        Row("heap", heap, reference("heap_bytes_per_token"), "B/token", 12),
        Row("wire", wire, reference("wire_bytes_per_token"), "B/token", 12),
        Row("encode + decode 200k tokens", codec, reference("encode_decode_ms"), "ms", 5),
        Row("flatten a tree of 64 leaves", flat, reference("flatten_ms"), "ms", reference("flatten_ms")),
        Row("merge, cut and pack 128 x 8k tokens", layout, None, "ms", 50),
        *balance_rows(rng),
    ]
    return finish("benchmarks/trace.py: recording, keeping, sending and laying out rollouts", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
