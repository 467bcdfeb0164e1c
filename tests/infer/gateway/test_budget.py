"""Budgets: the last reply is truncated, the next call refused, and concurrent calls never exceed a limit."""

import asyncio

import pytest

from ramify.core.errors import BudgetExceeded, ContextOverflow, RamifyError
from ramify.infer.gateway import RolloutSession
from ramify.trace import Trace
from tests.support.engine import check_tokens
from tests.support.scenario import make_session, user_request

LONG = "abcdefghijklmnopqrstuvwxyz" * 8


def used(trace: Trace) -> tuple[int, int]:
    """Return the numbers of context and sampled tokens of a trace."""
    return trace.graph.tokens.size - trace.graph.logprobs.size, trace.graph.logprobs.size


async def test_a_call_beyond_max_turns_raises_budget_exceeded():
    session, token_client = make_session(["one"] * 3, limits={"max_turns": 2})
    reply = await session.generate(user_request("a"))
    assert session.exhausted_limit is None
    await session.generate(user_request("b", parent_node=reply.node))
    assert session.exhausted_limit == "max_turns"
    with pytest.raises(BudgetExceeded, match="max_turns"):
        await session.generate(user_request("c"))
    assert len(token_client.requests) == 2


@pytest.mark.parametrize("name", ["max_output_tokens", "max_total_tokens"])
async def test_the_last_reply_is_truncated_exactly_at_the_limit(name):
    session, token_client = make_session([LONG] * 2, limits={name: 60})
    reply = await session.generate(user_request("a"))
    context, sampled = used(session.trace)
    assert reply.finish_reason == "length" and (sampled if name == "max_output_tokens" else context + sampled) == 60
    assert session.exhausted_limit == name
    assert (session.budget.input_tokens, session.budget.output_tokens) == (context, sampled)
    with pytest.raises(BudgetExceeded, match=name):
        await session.generate(user_request("b", parent_node=reply.node))
    check_tokens(session.trace, token_client)


async def test_context_tokens_count_once_for_all_calls():
    session, _ = make_session(["one"] * 40, limits={"max_input_tokens": 40})
    await session.generate(user_request("hello"))
    prompt, _ = used(session.trace)
    opening = session.trace.nodes[1].sampled_span[0]  # the generation prompt of each sample is context, too
    samples = (40 - prompt) // opening
    for _ in range(samples):
        await session.generate(user_request("hello"))
    with pytest.raises(BudgetExceeded, match="max_input_tokens"):
        await session.generate(user_request("hello"))
    assert session.num_turns == 1 + samples and used(session.trace)[0] == prompt + samples * opening


@pytest.mark.parametrize("limit", ["seq_len", "max_model_len"])
async def test_a_path_is_limited_to_the_sequence_length_and_longer_prompts_overflow(limit):
    limits = {"seq_len": 50} if limit == "seq_len" else {}
    session, _ = make_session([LONG] * 3, limits=limits, max_model_len=50 if limit == "max_model_len" else None)
    reply = await session.generate(user_request("a"))
    assert reply.finish_reason == "length" and len(session.trace.branches[0]) == 50
    with pytest.raises(ContextOverflow, match=r"^This model's maximum context length is 50 tokens \("):
        await session.generate(user_request("b", parent_node=reply.node))
    await session.generate(user_request("another branch"))


async def generate_concurrently(session: RolloutSession, count: int) -> list[RamifyError]:
    calls = [
        session.generate(user_request(f"question {n % 3}", sampling_overrides={"max_tokens": 30})) for n in range(count)
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return [outcome for outcome in outcomes if isinstance(outcome, RamifyError)]


@pytest.mark.parametrize("limits", [{"max_turns": 4}, {"max_output_tokens": 100}, {"max_total_tokens": 200}])
async def test_concurrent_calls_use_the_whole_budget_and_no_more(limits):
    session, token_client = make_session([LONG] * 12, limits=limits)
    refused = await generate_concurrently(session, 12)
    assert refused and {type(error) for error in refused} == {BudgetExceeded}
    context, sampled = used(session.trace)
    ((name, limit),) = limits.items()
    total = {"max_turns": session.num_turns, "max_output_tokens": sampled, "max_total_tokens": context + sampled}[name]
    assert limit - total < (1 if name != "max_total_tokens" else 40) and total <= limit
    assert session.num_turns == 12 - len(refused)
    check_tokens(session.trace, token_client)


async def test_a_call_without_max_tokens_does_not_starve_concurrent_calls():
    session, _ = make_session(["short"] * 6, limits={"max_output_tokens": 40})
    await asyncio.gather(*(session.generate(user_request(f"q{n}")) for n in range(6)))
    assert session.num_turns == 6 and session.budget.output_tokens == 36


async def test_a_failed_call_releases_its_budget():
    session, token_client = make_session(["one"] * 2, limits={"max_turns": 1}, call_timeout=60)
    token_client.gate.clear()
    first = asyncio.create_task(session.generate(user_request("a")))
    await asyncio.sleep(0)
    second = asyncio.create_task(session.generate(user_request("b")))
    await asyncio.sleep(0)
    first.cancel()
    token_client.gate.set()
    assert (await second).message.text == "one" and session.num_turns == 1
