"""Hand-made rollouts: one prompt, replies of given tokens and logprobs, and rewards."""

from collections.abc import Sequence

from ramify.errors import Failure
from ramify.trace import Message, ModelCall, Trace, VersionRun

PROMPT = [1, 2, 3]


def rollout(
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
) -> Trace:
    trace = Trace(id=name, agent=agent, rewards={"score": None if reward is None else (reward, 1.0)})
    node = trace.add_node(-1, Message("user", "?"), PROMPT)
    for turn in range(turns):
        if turn:
            node = trace.add_node(node, Message("user", "and?"), [4])
        node = trace.add_node(
            node,
            Message("assistant", "!"),
            [5, *reply],
            sampled_span=(1, 1 + len(reply)),
            logprobs=[-0.5] * len(reply) if logprobs is None else logprobs,
            versions=[VersionRun("policy", 0, version, len(reply))],
            call=ModelCall(f"{name}-{turn}", finish_reason="stop"),
            trainable=trainable,
        )
    if failure:
        trace.errors.append(Failure(failure, "made up", "policy" if failure == "ContextOverflow" else "system", True))
    return trace


def group(*rewards: float, **more) -> list[Trace]:
    return [rollout(f"t{number}", reward, **more) for number, reward in enumerate(rewards)]


def refuse_top_logprobs(number: int):
    """Stand for the reader of likeliest tokens where no group uses them."""
    raise AssertionError(f"group {number} has no likeliest tokens")
