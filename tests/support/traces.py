"""Small traces and rollouts made by hand: a prompt, replies of given tokens and logprobs, and rewards."""

from collections.abc import Sequence
from typing import Any

from ramify.core.errors import Failure
from ramify.run.store import RolloutRecord, RunStore
from ramify.trace import Message, ModelCall, Trace, Usage, VersionSpan

PROMPT = [1, 2, 3]


def make_trace(
    name: str = "t0",
    reward: float | None = 0.0,
    reply: Sequence[int] = (10, 11),
    logprobs: Sequence[float] | None = None,
    *,
    agent: str = "",
    failure: str | None = None,
    turns: int = 1,
    trainable: bool = True,
    version: int = 0,
    finish_reasons: Sequence[str] = (),
) -> Trace:
    """Return a trace whose turns all have the same reply; `finish_reasons` are of the turns, by default "stop"."""
    trace = Trace(id=name, agent=agent, rewards={"score": None if reward is None else (reward, 1.0)})
    node = trace.graph.add_node(-1, Message("user", "?"), PROMPT)
    for turn in range(turns):
        if turn:
            node = trace.graph.add_node(node, Message("user", "and?"), [4])
        node = trace.graph.add_node(
            node,
            Message("assistant", "!"),
            [5, *reply],
            sampled_span=(1, 1 + len(reply)),
            logprobs=[-0.5] * len(reply) if logprobs is None else logprobs,
            versions=[VersionSpan("policy", 0, version, len(reply))],
            call=ModelCall(f"{name}-{turn}", finish_reason=finish_reasons[turn] if finish_reasons else "stop"),
            trainable=trainable,
        )
    if failure:
        trace.errors.append(Failure(failure, "made up", "policy" if failure == "ContextOverflow" else "system", True))
    return trace


def make_group(*rewards: float, **options: Any) -> list[Trace]:
    """Return one trace for each reward."""
    return [make_trace(f"t{number}", reward, **options) for number, reward in enumerate(rewards)]


def refuse_top_logprobs(number: int) -> None:
    """Read the likeliest tokens of a group where no group uses them."""
    raise AssertionError(f"group {number} has no likeliest tokens")


def make_rollout(
    number: int = 0, *, text: str | None = None, reward: float | None = 0.5, failure: str | None = None
) -> tuple[RolloutRecord, list[Trace]]:
    """Return what a run stores of rollout `number`: its record and its traces."""
    reply = text if text is not None else f"reply {number}"
    trace = Trace(id=f"t{number}", episode=f"e{number}", task={"prompt": f"question {number}"})
    question = trace.graph.add_node(-1, Message("user", f"question {number}"), [1, 2, number])
    trace.graph.add_node(
        question,
        Message("assistant", reply),
        [3, 4, 5],
        sampled_span=(1, 3),
        logprobs=[-0.5, -0.25],
        call=ModelCall(f"c{number}", finish_reason="stop", usage=Usage(3, 2)),
    )
    trace.rewards = {"score": None if reward is None else (reward, 1.0)}
    record = RolloutRecord(
        f"r{number}", f"task-{number // 2}", number % 2, reward=reward, failure=failure, summary={"output": 2}
    )
    return record, [trace]


def read_replies(store: RunStore) -> dict[str, str]:
    """Return the reply of every rollout by its id, which checks that all of them can be read."""
    return {record.id: store.read_traces(record.id)[0].last_reply for record in store.rollouts()}
