"""Small rollouts for tests: a question, a reply, a reward."""

from ramify.store import RolloutRecord
from ramify.trace import Message, ModelCall, Trace, Usage


def rollout(number: int = 0, *, text: str | None = None, reward: float | None = 0.5, failure: str | None = None):
    """Return (record, traces) of rollout `number`."""
    reply = text if text is not None else f"reply {number}"
    trace = Trace(id=f"t{number}", episode=f"e{number}", task={"prompt": f"question {number}"})
    question = trace.add_node(-1, Message("user", f"question {number}"), [1, 2, number])
    trace.add_node(
        question,
        Message("assistant", reply),
        [3, 4, 5],
        sampled_span=(1, 3),
        logprobs=[-0.5, -0.25],
        call=ModelCall(f"c{number}", finish_reason="stop", usage=Usage(3, 2)),
    )
    trace.rewards = {"score": None if reward is None else (reward, 1.0)}
    summary = {"output": 2}
    record = RolloutRecord(
        f"r{number}", f"task-{number // 2}", number % 2, reward=reward, failure=failure, summary=summary
    )
    return record, [trace]


def replies(store) -> dict[str, str]:
    """Return the reply of every rollout by its id, which checks that all of them can be read."""
    return {record.id: store.read_traces(record.id)[0].last_reply for record in store.rollouts()}
