"""Agents that rewrite their history, and agents beside agents: forks with shared prefixes stored once, and why."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ramify.errors import BudgetExceeded, ContextOverflow
from ramify.gateway import ModelRequest
from ramify.trace import Message, Trace
from tests.gateway.engine import check_tokens
from tests.gateway.sampler import session_of
from tests.gateway.stage import Stage
from tests.render.models import renderer


def shared_once(trace: Trace) -> None:
    """No node repeats what a sibling says: common prefixes are one path. Samples may well be equal."""
    seen: set[tuple[int, bytes]] = set()
    for node in trace.nodes:
        if node.call is None:
            place = (node.parent, node.token_ids.tobytes())
            assert place not in seen, f"node {node.index} repeats a sibling"
            seen.add(place)


def test_an_agent_that_drops_old_turns_forks_where_it_cut(play):
    async def act(stage: Stage) -> None:
        history = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": "the task"}]
        client = stage.openai()
        for turn in range(5):
            answer = await client.chat.completions.create(model="x", messages=history)
            history += [{"role": "assistant", "content": answer.choices[0].message.content}]
            history += [{"role": "user", "content": f"result {turn}"}]
            if turn == 2:
                del history[2:6]  # keeps the task and the last turn
        assert stage.reasons == ["dropped"] and len(stage.trace.leaves) == 2
        fork = stage.trace.info["forks"][0]
        assert stage.trace.nodes[fork["at"]].message.text == "the task"
        assert stage.trace.metrics["forks"] == 1
        shared_once(stage.trace)
        check_tokens(stage.trace, stage.engine)

    count = iter(range(100))
    play(lambda _: f"step {next(count)}", act)


def test_an_agent_that_sums_up_its_history_forks_as_edited(play):
    async def act(stage: Stage) -> None:
        await stage.chat("the task")
        await stage.chat("the task", "step 0", "go on")
        await stage.chat("the task", "in short: two steps", "go on")
        assert stage.reasons == ["edited"] and len(stage.trace.leaves) == 2
        shared_once(stage.trace)
        check_tokens(stage.trace, stage.engine)

    count = iter(range(100))
    play(lambda _: f"step {next(count)}", act)


def test_sub_agents_side_by_side_are_branches_of_the_same_trace(play):
    async def act(stage: Stage) -> None:
        client = stage.openai()
        system = {"role": "system", "content": "You are careful."}

        async def agent(name: str) -> None:
            history = [system, {"role": "user", "content": f"the part of {name}"}]
            for turn in range(3):
                answer = await client.chat.completions.create(model="x", messages=history)
                said = answer.choices[0].message.content
                history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"result {turn}"}]

        await asyncio.gather(agent("a"), agent("b"), agent("c"))
        assert stage.reasons == ["new_conversation"] * 2
        assert len(stage.trace.leaves) == 3 and stage.session.num_turns == 9
        assert [node.message.role for node in stage.trace.nodes].count("system") == 1
        shared_once(stage.trace)
        check_tokens(stage.trace, stage.engine)

    count = iter(range(100))
    play(lambda _: f"step {next(count)}", act)


def forks_in(trace: Trace) -> int:
    """Nodes whose parent was continued before them, and roots after the first."""
    parents = [node.parent for node in trace.nodes]
    return len(parents) - len(set(parents))


# -- any client, any rewriting ----------------------------------------------------------------------------------------

WORDS = st.sampled_from(["yes", "no", " maybe ", "look\nhere", "é", "<think>\nhm\n</think>\n\nso", "ok"])
CALLING = '<tool_call>{"name": "f", "arguments": {"x":1.0}}</tool_call>'
MOVES = st.lists(
    st.tuples(st.sampled_from(["on", "again", "drop", "edit", "cut", "fresh", "both"]), WORDS, st.integers(0, 2**16)),
    min_size=1,
    max_size=8,
)


def resent(message: Message, rng: random.Random) -> Message:
    """A reply as a client sends it back: perhaps without its reasoning, its calls printed anew."""
    if message.role != "assistant":
        return message
    calls = tuple(replace(call, arguments=call.arguments.replace(":1.0", " : 1")) for call in message.tool_calls)
    return replace(message, tool_calls=calls, reasoning=rng.choice([None, message.reasoning]))


async def conversation(session, moves) -> int:
    """Play a client that rewrites what it likes; how many calls were refused for want of budget."""
    history: list[Message] = [Message("system", "Be."), Message("user", "go")]
    refused = 0
    for move, word, seed in moves:
        rng = random.Random(seed)
        if move == "drop" and len(history) > 4:
            del history[2:4]
        elif move == "edit":
            history[-1] = Message("user", word) if history[-1].role == "user" else history[-1]
        elif move == "cut":
            del history[max(2, len(history) - 2) :]
        elif move == "fresh":
            history = [Message("user", word)]
        sent = tuple(resent(message, rng) for message in history)
        count = 3 if move == "both" else 1
        asked = {"max_tokens": rng.choice([3, 20])}
        answers = await asyncio.gather(
            *(session.generate(ModelRequest(sent, sampling_overrides=asked)) for _ in range(count)),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BudgetExceeded | ContextOverflow):
                raise answer
        refused += sum(isinstance(answer, BaseException) for answer in answers)
        reply = next((answer for answer in answers if not isinstance(answer, BaseException)), None)
        if reply is None or move == "again":
            continue
        results = [Message("tool", word, tool_call_id=call.id) for call in reply.message.tool_calls]
        history += [reply.message, *(results or [Message("user", word)])]
    return refused


@given(MOVES, st.lists(st.one_of(WORDS, st.just(CALLING)), min_size=1, max_size=5), st.sampled_from(["tiny", "qwen3"]))
def test_whatever_a_client_rewrites_paths_are_what_the_engine_saw(moves, script, model):
    async def act() -> None:
        count = iter(range(1000))
        spoken = {} if model == "tiny" else {"renderer": renderer(model)}
        session, sampler = session_of(lambda _: script[next(count) % len(script)], **spoken)
        assert await conversation(session, moves) == 0
        trace = session.trace
        check_tokens(trace, sampler)
        shared_once(trace)
        assert len(trace.info.get("forks", [])) == forks_in(trace)

    asyncio.run(act())


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_turns": st.integers(1, 6),
        "max_input_tokens": st.integers(20, 120),
        "max_output_tokens": st.integers(1, 60),
        "max_total_tokens": st.integers(20, 150),
        "seq_len": st.integers(20, 100),
    },
)


@given(MOVES, LIMITS)
def test_budgets_hold_to_the_token_whatever_is_asked_side_by_side(moves, limits):
    async def act() -> None:
        session, sampler = session_of(lambda _: "a somewhat longer reply", limits=limits)
        refused = await conversation(session, moves)
        trace = session.trace
        sampled = trace.graph.logprobs.size
        context = trace.graph.tokens.size - sampled
        assert (session.input_tokens, session.output_tokens) == (context, sampled)
        turns = sum(node.call is not None for node in trace.nodes)
        used = {"max_turns": turns, "max_input_tokens": context, "max_output_tokens": sampled}
        used |= {"max_total_tokens": context + sampled, "seq_len": max(map(len, trace.branches), default=0)}
        assert all(used[name] <= most for name, most in limits.items())
        assert not refused or limits
        check_tokens(trace, sampler)

    asyncio.run(act())
