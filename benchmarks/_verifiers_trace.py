"""The trace of `verifiers` 0.4.0, measured on the shared synthetic rollouts with the calls its own servers make.

Run by an interpreter that has `verifiers` installed; prints one JSON object. What is measured:

- *append*: process CPU of `prepare_turn`, `PendingTurn.commit` and the `ModelCall` record, as its interception server
  does for a model call. Messages, responses and token lists exist before the clock starts, and a prompt is declared to
  extend the stored prefix (`bridged`, only the new message has a span), the cheapest path its training client takes.
- *heap*: `tracemalloc` bytes that stay alive with a 200-turn trace once its inputs are gone, messages included.
- *wire*: the frames its env server sends for a finished trace (`DeltaStreamer`, msgpack) and what its client does to
  them (`EpisodeAssembly`, validation into a `WireEpisode`). One delta holds the whole trace: sent turn by turn, as the
  trace grows, it costs a little more.
- *flatten*: a tree of 64 leaves into the three per-token lists of each branch, its training samples.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.metadata import version

from _check import median
from _synthetic import Turn, chain, digest, path, prompt, tree
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import Episode, WireEpisode
from verifiers.v1.graph import prepare_turn
from verifiers.v1.serve.delta import DeltaStreamer, EpisodeAssembly, TraceSummary, dump, pack, unpack
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, ModelCall, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, Message, Response, TurnTokens, Usage, UserMessage

VERSION = "0.4.0"
APPEND_TURNS = (50, 200, 400)
HEAP_TURNS = 200
WIRE_TURNS = 400


def new_trace() -> WireTrace:
    return WireTrace(
        task=TraceTask(type="Synthetic", data=WireTaskData(idx=0, prompt="synthetic")),
        agent=AgentInfo(config=WireAgentConfig()),
    )


def answer(turns: Sequence[Turn], index: int, messages: int) -> Response:
    """What the training client would return for turn `index`, whose request holds that many messages."""
    turn = turns[index]
    ids = prompt(turns, index).tolist()
    before = len(ids) - len(turn.added)
    tokens = TurnTokens.model_construct(
        prompt_ids=ids,
        completion_ids=turn.sampled.tolist(),
        completion_logprobs=turn.logprobs.tolist(),
        message_spans=[*[None] * (messages - 1), (before, len(ids))],
        is_content=[False] * before + [True] * len(turn.added),
        bridged=turn.parent >= 0,
    )
    return Response(
        id=f"call-{index}",
        created=0,
        model="policy",
        message=AssistantMessage(content=turn.reply),
        finish_reason="stop",
        usage=Usage(prompt_tokens=len(ids), completion_tokens=len(turn.sampled)),
        tokens=tokens,
    )


def record(turns: Sequence[Turn]) -> tuple[WireTrace, float]:
    """The trace of these turns, and the CPU seconds spent inside the library."""
    trace = new_trace()
    said: list[tuple[Message, Message]] = []
    seconds = 0.0
    for index, turn in enumerate(turns):
        asked = UserMessage(content=turn.user)
        messages = [message for before in path(turns, index)[:-1] for message in said[before]] + [asked]
        response = answer(turns, index, len(messages))
        started = time.process_time()
        node = prepare_turn(trace, messages).commit(response)
        trace.calls.append(
            ModelCall(node=node, model=response.model, finish_reason=response.finish_reason, usage=response.usage)
        )
        seconds += time.process_time() - started
        said.append((asked, response.message))
    return trace, seconds


def heap_bytes_per_token() -> float:
    gc.collect()
    tracemalloc.start()
    trace, _ = record(chain(HEAP_TURNS))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / sum(len(node.token_ids) for node in trace.nodes)


async def encode(trace: WireTrace) -> list[bytes]:
    frames: list[bytes] = []

    async def send(delta: dict) -> None:
        frames.append(pack(delta))

    await DeltaStreamer(lambda: [trace], send).flush()
    return frames


def decode(frames: Sequence[bytes], head: dict, summary: TraceSummary) -> WireEpisode:
    assembly = EpisodeAssembly()
    for frame in frames:
        assembly.apply(unpack(frame))
    return WireEpisode.model_validate(assembly.finish(head, [summary]))


def flatten(trace: WireTrace) -> list[tuple[list[int], list[bool], list[float]]]:
    return [(branch.token_ids, branch.sampled_mask, branch.logprobs) for branch in trace.branches]


def milliseconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    kept = work()
    elapsed = time.perf_counter() - started
    del kept
    return 1e3 * elapsed


def verify(turns: Sequence[Turn], trace: WireTrace) -> None:
    """The comparison is void unless every branch is exactly what the engine saw and sampled."""
    parents = {turn.parent for turn in turns}
    leaves = [index for index in range(len(turns)) if index not in parents]
    expected = [(prompt(turns, leaf) + turns[leaf].sampled).tolist() for leaf in leaves]
    if [branch.token_ids for branch in trace.branches] != expected:
        raise AssertionError("the recorded branches are not the tokens of the synthetic rollout")


def wire_costs(trace: WireTrace) -> dict[str, float]:
    tokens = sum(len(node.token_ids) for node in trace.nodes)
    head = dump(Episode(task=trace.task, ok=True), exclude={"traces"})
    summary = TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls))
    with asyncio.Runner() as runner:
        frames = runner.run(encode(trace))
        return {
            "wire_bytes_per_token": sum(map(len, frames)) / tokens,
            "encode_ms": median(lambda: milliseconds(lambda: runner.run(encode(trace)))),
            "decode_ms": median(lambda: milliseconds(lambda: decode(frames, head, summary))),
            "encode_decode_ms": median(lambda: milliseconds(lambda: decode(runner.run(encode(trace)), head, summary))),
        }


def measure(turns: Sequence[Turn], forked: Sequence[Turn]) -> dict[str, object]:
    append = {str(count): median(lambda count=count: record(turns[:count])[1]) for count in APPEND_TURNS}
    heap = median(heap_bytes_per_token)
    trace, _ = record(turns[:WIRE_TURNS])
    forest, _ = record(forked)
    verify(turns[:WIRE_TURNS], trace)
    verify(forked, forest)
    return {
        "append_cpu_s": append,
        "heap_bytes_per_token": heap,
        **wire_costs(trace),
        "flatten_ms": median(lambda: milliseconds(lambda: flatten(forest))),
        "flat_tokens": sum(len(branch.token_ids) for branch in forest.branches),
    }


def main() -> None:
    if version("verifiers") != VERSION:
        raise SystemExit(f"the comparison is with verifiers {VERSION}, found {version('verifiers')}")
    turns, forked = chain(max(*APPEND_TURNS, WIRE_TURNS)), tree()
    data = {"chain": digest(turns), "tree": digest(forked)}
    print(json.dumps({"verifiers": VERSION, "data": data, **measure(turns, forked)}))


if __name__ == "__main__":
    main()
