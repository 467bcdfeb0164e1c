"""Runs for the tests of the page, written through the store and the ledger as an orchestrator writes them."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ramify.core.interactive import run_coroutine
from ramify.orchestrate.batches import BatchGroup, encode_batch
from ramify.run.fencing.token import FencingToken
from ramify.run.store import DropReason, Ledger, RolloutRecord, RunLog, RunStore
from ramify.run.store.ledger_tables import CommitRecord, GroupRecord
from ramify.run.store.run_directory import IDENTITY_KEY
from ramify.run.store.summary import summarize_rollout
from ramify.trace import Annotation, Media, MediaPart, Message, ModelCall, TextPart, ToolCall, Trace, Usage, VersionSpan
from ramify.train.token_stats import FILE_NAME, TOKEN_STATS_DIR

RL_CONFIG = """name = "run"
max_steps = 4
[model]
name = "tiny"
[[train]]
name = "reverse"
taskset = { id = "reverse-text" }
"""
EVAL_CONFIG = '[model]\nname = "tiny"\n[taskset]\nid = "reverse-text"\n'
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)
PROMPT = [40, 41, 42]
# The third sampled token differs: attempts 0 and 1 share two, attempt 2 leaves at once.
REPLIES = {0: [50, 51, 52, 2], 1: [50, 51, 53, 2], 2: [60, 61, 62, 2]}
REWARDS = {0: 1.0, 1: 0.5, 2: 0.0}


def make_trace(
    id: str,
    attempt: int,
    reply: list[int],
    reward: float,
    *,
    text: str = "",
    step: int = 0,
    prompt: Sequence[int] = PROMPT,
) -> Trace:
    """Return a trace with one question and one reply."""
    trace = Trace(id=id, episode=id, group=id.split(".")[0], attempt=attempt, env="reverse", task={"prompt": "abc"})
    question = trace.graph.add_node(-1, Message("user", "abc"), prompt)
    trace.graph.add_node(
        question,
        Message("assistant", text or f"reply {attempt}"),
        [1, *reply],
        sampled_span=(1, 1 + len(reply)),
        logprobs=[-0.1 * (place + 1) for place in range(len(reply))],
        versions=[VersionSpan("tiny", 0, step, len(reply))],
        call=ModelCall(f"call-{id}", served_model="tiny", finish_reason="stop", usage=Usage(3, len(reply))),
    )
    trace.rewards = {"similarity": (reward, 1.0)}
    trace.metrics = {"exact": float(reward == 1.0)}
    trace.stop = "done"
    trace.timing.harness = 0.5
    return trace


def make_record(id: str, task: str, repetition: int, source: str, traces: list[Trace]) -> RolloutRecord:
    """Return the index row of a rollout."""
    return RolloutRecord(id, task, repetition, source, traces[0].reward, summary=summarize_rollout(traces))


def write_rl_run(
    path: Path,
    *,
    num_groups: int = 4,
    texts: dict[tuple[int, int], str] | None = None,
    prompt: Sequence[int] = PROMPT,
) -> Path:
    """Write a finished run of `num_groups` groups of three attempts; the last group is dropped, the others trained."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(RL_CONFIG)
    with RunStore.open(path) as store:
        store.set_fact(IDENTITY_KEY, {"model": "tiny"})
        run_coroutine(_write_groups(store, num_groups, texts or {}, prompt))
    return path


async def _write_groups(
    store: RunStore, num_groups: int, texts: dict[tuple[int, int], str], prompt: Sequence[int]
) -> None:
    ledger, log = Ledger.open(store), RunLog(store)
    log.log_event("started", committed=0, incarnation=0)
    await ledger.register_trainer()  # it is replaced
    incarnation = (await ledger.register_trainer()).incarnation
    for number in range(num_groups):
        group = GroupRecord(number, "reverse", number, 3)
        await ledger.issue_groups([group])
        traces = []
        for attempt, reply in REPLIES.items():
            id = f"{number}.{attempt}"
            trace = make_trace(
                id, attempt, reply, REWARDS[attempt], text=texts.get((number, attempt), ""), step=number, prompt=prompt
            )
            await ledger.record_sampled(
                number, attempt, make_record(id, str(number), attempt, "reverse", [trace]), [trace]
            )
            traces.append(trace)
        if number == num_groups - 1:
            await ledger.drop_group(number, DropReason.FILTERED, "zero_advantage")
            continue
        advantages = {attempt: reward - 0.5 for attempt, reward in REWARDS.items()}
        await ledger.record_scored(number, {at: {"reward": REWARDS[at], "advantage": advantages[at]} for at in REWARDS})
        annotations = tuple(Annotation(trace.id, 1, advantage=advantages[trace.attempt]) for trace in traces)
        batch_group = BatchGroup(number, "reverse", 1.0, tuple(trace.id for trace in traces), annotations)
        forest = batch_group.build_forest(traces, None)
        await ledger.record_batch(encode_batch(number, [(batch_group, forest)], None))
        await ledger.record_served(number, incarnation=incarnation)
        write_token_stats(store.path, number, incarnation, traces)
        await ledger.acknowledge_step(number, incarnation=incarnation)
        log.log_metrics(
            number,
            {
                "reward/all/mean": 0.5 + number / 10,
                "reward/reverse/mean": 0.5 + number / 10,
                "reward/reverse/similarity": 0.5 + number / 10,
                "metric/reverse/exact": number / 10,
                "truncated": 0.25,
                "time/step": 2.0,
                "entropy": 1.0 / (number + 1),
                "forest/token_ratio": 2.5,
                "tokens/sampled": 4.0,
                "rollouts": 3.0,
                "time/unix": 1000.0 + 10 * number,
                "staleness/mean": 0.0,
                "staleness/max": 0.0,
            },
        )
        if number % 2 == 0:
            eval_metrics = {"avg": 0.4 + number / 10, "error": 0.02, "metric/exact": 0.2, "pass@2": 0.6, "pass^2": 0.3}
            log.log_metrics(number, {f"eval/held-out/{name}": value for name, value in eval_metrics.items()})
    await ledger.commit_version(CommitRecord(num_groups - 1, incarnation, f"step_{num_groups - 1:06d}"))
    log.log_event("failure", where="reverse", name="ProcessDied", message="exit code -9\nmore")
    log.log_event("failure", where="reverse", name="ProcessDied", message="exit code -9")
    await asyncio.wrap_future(log.log_event("finished", step=num_groups - 1))


def write_token_stats(path: Path, step: int, incarnation: int, traces: list[Trace]) -> None:
    """Write what the trainer of a step records: it finds each token a little less likely than the sampler did."""
    rows = [(number, place) for number, trace in enumerate(traces) for place in range(len(trace.nodes[1].logprobs))]
    columns = {
        "trace_ids": np.array([trace.id for trace in traces]),
        "trace": np.array([number for number, _ in rows], np.int32),
        "node": np.ones(len(rows), np.int32),
        "depth": np.array([len(PROMPT) + 1 + place for _, place in rows], np.int32),
        "logprob": np.array([traces[number].nodes[1].logprobs[place] - 0.01 * place for number, place in rows], "f4"),
        "entropy": np.array([0.5 * place for _, place in rows], np.float16),
    }
    (path / TOKEN_STATS_DIR).mkdir(exist_ok=True)
    name = FILE_NAME.format(step=step, token=FencingToken.from_number(incarnation), rank=0)
    np.savez_compressed(path / TOKEN_STATS_DIR / name, allow_pickle=False, **columns)


def write_eval_run(path: Path) -> Path:
    """Write an eval of two tasks with two repetitions each; one rollout is `make_branching_trace`."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(EVAL_CONFIG)
    with RunStore.open(path) as store:
        store.set_fact(IDENTITY_KEY, {"model": "tiny"})
        for number in range(4):
            trace = make_branching_trace() if number == 0 else make_trace(f"t{number}", 0, [50, 2], number / 4)
            record = make_record(f"task-{number // 2}.{number % 2}", f"task-{number // 2}", number % 2, "", [trace])
            if number == 0:
                record = dataclasses.replace(record, summary={**record.summary, "errors": {"MalformedCall": 1}})
            run_coroutine(store.add_rollout(record, [trace]))
    return path


def make_branching_trace() -> Trace:
    """Return a trace with a tool call, its result with an image, a branch, reasoning, code and a diff."""
    trace = Trace(id="t0", task={"prompt": "fix the bug"})
    image = trace.add_media(Media.from_bytes(PNG, "image/png"))
    hash = trace.graph.media[image].hash
    system = trace.graph.add_node(-1, Message("system", "You fix bugs."), [40])
    user = trace.graph.add_node(system, Message("user", "Fix the bug in `add`."), [41])
    calls = (ToolCall("c1", "read_file", '{"path": "add.py", "lines": [1, 20]}'),)
    reply = Message("assistant", "I look at the file.", "The sum is wrong, so the file must be read.", calls)
    ask = trace.graph.add_node(user, reply, [1, 50, 2], sampled_span=(1, 3), logprobs=[-0.5, -2.5], call=ModelCall("a"))
    content = (TextPart("def add(a, b):\n    return a - b\n"), MediaPart(hash))
    result = trace.graph.add_node(ask, Message("tool", content, tool_call_id="c1"), [42])
    diff = "--- a/add.py\n+++ b/add.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b"
    diff = f"Here it is:\n```diff\n{diff}\n```\n"
    for at, text in enumerate((diff, "```python\nreturn a + b  # a sum\n```", "I give up.")):
        call = ModelCall(f"b{at}", finish_reason="stop", start_time=10.0, end_time=11.5)
        trace.graph.add_node(
            result, Message("assistant", text), [1, 60 + at, 2], sampled_span=(1, 3), logprobs=[-1.0, -0.1], call=call
        )
    trace.info["forks"] = [{"node": 5, "at": 3, "reason": "retry", "detail": "the agent asked again"}]
    trace.rewards = {"tests": (0.25, 2.0), "style": (0.5, 0.5)}
    trace.stop = "done"
    return trace
