"""Budgets: the last call is cut to what is left, the next refused, and calls side by side never pass a limit."""

import asyncio

import pytest

from ramify.errors import BudgetExceeded, ContextOverflow, RamifyError
from ramify.gateway import RolloutSession
from ramify.trace import Trace
from tests.gateway.engine import check_tokens
from tests.gateway.sampler import session_of, user

LONG = "abcdefghijklmnopqrstuvwxyz" * 8


def used(trace: Trace) -> tuple[int, int]:
    """Context and sampled tokens of a trace."""
    return trace.graph.tokens.size - trace.graph.logprobs.size, trace.graph.logprobs.size


def test_turns_are_counted_and_the_next_call_is_refused_by_name():
    async def act():
        session, sampler = session_of(["one"] * 3, limits={"max_turns": 2})
        reply = await session.generate(user("a"))
        assert session.exhausted_limit is None
        await session.generate(user("b", parent_node=reply.node))
        assert session.exhausted_limit == "max_turns"
        with pytest.raises(BudgetExceeded, match="max_turns"):
            await session.generate(user("c"))
        assert len(sampler.asked) == 2

    asyncio.run(act())


@pytest.mark.parametrize("name", ["max_output_tokens", "max_total_tokens"])
def test_the_last_reply_is_cut_to_the_token(name):
    async def act():
        session, sampler = session_of([LONG] * 2, limits={name: 60})
        reply = await session.generate(user("a"))
        context, sampled = used(session.trace)
        assert reply.finish_reason == "length" and (sampled if name == "max_output_tokens" else context + sampled) == 60
        assert session.exhausted_limit == name and (session.input_tokens, session.output_tokens) == (context, sampled)
        with pytest.raises(BudgetExceeded, match=name):
            await session.generate(user("b", parent_node=reply.node))
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_context_counts_once_however_many_calls_see_it():
    async def act():
        session, _ = session_of(["one"] * 40, limits={"max_input_tokens": 40})
        await session.generate(user("hello"))
        prompt, _ = used(session.trace)
        opening = session.trace.nodes[1].sampled_span[0]  # what opens a reply is context of its own
        samples = (40 - prompt) // opening
        for _ in range(samples):
            await session.generate(user("hello"))
        with pytest.raises(BudgetExceeded, match="max_input_tokens"):
            await session.generate(user("hello"))
        assert session.num_turns == 1 + samples and used(session.trace)[0] == prompt + samples * opening

    asyncio.run(act())


@pytest.mark.parametrize("limit", ["seq_len", "max_model_len"])
def test_a_path_ends_where_the_sequence_does_and_a_prompt_that_leaves_no_room_overflows(limit):
    async def act():
        limits = {"seq_len": 50} if limit == "seq_len" else {}
        session, _ = session_of([LONG] * 3, limits=limits, max_model_len=50 if limit == "max_model_len" else None)
        reply = await session.generate(user("a"))
        assert reply.finish_reason == "length" and len(session.trace.branches[0]) == 50
        with pytest.raises(ContextOverflow, match="50"):
            await session.generate(user("b", parent_node=reply.node))
        await session.generate(user("another branch"))

    asyncio.run(act())


async def side_by_side(session: RolloutSession, count: int) -> list[RamifyError]:
    calls = [session.generate(user(f"question {n % 3}", sampling_overrides={"max_tokens": 30})) for n in range(count)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return [outcome for outcome in outcomes if isinstance(outcome, RamifyError)]


@pytest.mark.parametrize("limits", [{"max_turns": 4}, {"max_output_tokens": 100}, {"max_total_tokens": 200}])
def test_parallel_calls_use_a_budget_to_its_end_and_not_beyond(limits):
    async def act():
        session, sampler = session_of([LONG] * 12, limits=limits)
        refused = await side_by_side(session, 12)
        assert refused and {type(error) for error in refused} == {BudgetExceeded}
        context, sampled = used(session.trace)
        ((name, most),) = limits.items()
        total = {"max_turns": session.num_turns, "max_output_tokens": sampled, "max_total_tokens": context + sampled}[
            name
        ]
        assert most - total < (1 if name != "max_total_tokens" else 40) and total <= most
        assert session.num_turns == 12 - len(refused)
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_a_call_without_a_limit_of_its_own_does_not_starve_those_beside_it():
    async def act():
        session, _ = session_of(["short"] * 6, limits={"max_output_tokens": 40})
        await asyncio.gather(*(session.generate(user(f"q{n}")) for n in range(6)))
        assert session.num_turns == 6 and session.output_tokens == 36

    asyncio.run(act())


def test_a_call_that_fails_gives_back_what_it_held():
    async def act():
        session, sampler = session_of(["one"] * 2, limits={"max_turns": 1}, call_timeout=5)
        sampler.gate.clear()
        first = asyncio.create_task(session.generate(user("a")))
        await asyncio.sleep(0)
        second = asyncio.create_task(session.generate(user("b")))
        await asyncio.sleep(0)
        first.cancel()
        sampler.gate.set()
        assert (await second).message.text == "one" and session.num_turns == 1

    asyncio.run(act())
