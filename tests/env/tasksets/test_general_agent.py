"""general-agent: a task is scored by its final database."""

import pytest

from ramify.env.tasksets.general_agent import (
    WORLDS,
    GeneralAgent,
    GeneralAgentConfig,
    build_goal_world,
    build_initial_world,
)
from ramify.env.tasksets.general_agent.world import ActionRefused, make_call
from ramify.trace import Message, ToolCall
from tests.support.scripted_agent import get_texts, make_tool_call, play

WRITES = {
    "shop": {"place_order", "cancel_order", "move_customer"},
    "hotel": {"book_room", "cancel_stay", "move_stay"},
    "library": {"lend_book", "return_book", "renew_loan", "pay_fine"},
    "tickets": {"assign_ticket", "close_ticket", "reopen_ticket"},
}


def tasks(domain: str, count: int = 30, **settings: object):
    return list(GeneralAgent(GeneralAgentConfig(domains=(domain,), num_tasks=count, **settings)).load())


def plain(world) -> dict:
    return world.model_dump(mode="json")


@pytest.mark.parametrize("domain", WORLDS)
async def test_doing_nothing_does_not_reach_the_goal(domain):
    for task in tasks(domain):
        assert plain(build_goal_world(task)) != task.database
        assert (await play(GeneralAgent(), task, "Done.")).reward == 0.0


@pytest.mark.parametrize("domain", WORLDS)
async def test_write_calls_alone_reach_the_goal(domain):
    for task in tasks(domain):
        replies = [make_tool_call(step.tool, **step.arguments) for step in task.calls if step.tool in WRITES[domain]]
        assert (await play(GeneralAgent(), task, [*replies, "Done."])).reward == 1.0


@pytest.mark.parametrize("domain", WORLDS)
async def test_missing_call_misses_the_goal_and_refused_call_is_harmless(domain):
    refused = make_tool_call(sorted(WRITES[domain])[0])  # without arguments
    for task in tasks(domain, 10, max_goals=1):
        *gold, done = GeneralAgent().gold(task)
        assert (await play(GeneralAgent(), task, [*gold[:-1], done])).reward == 0.0
        assert (await play(GeneralAgent(), task, [*gold, refused, done])).reward == 1.0


async def test_extra_change_misses_the_goal():
    for task in tasks("shop", 10):
        *gold, done = GeneralAgent().gold(task)
        beside = make_tool_call("move_customer", customer_id="C0", city="Nowhere")
        assert (await play(GeneralAgent(), task, [*gold, beside, done])).reward == 0.0


@pytest.mark.parametrize("domain", WORLDS)
def test_every_argument_is_in_the_prompt_or_in_tool_results(domain):
    """Every argument of a gold call is in the prompt, in a tool result, or the name of a status."""
    for task in tasks(domain):
        world = build_initial_world(task)
        told = str(task.prompt)
        for step in task.calls:
            fresh = {"status"}
            for name, value in step.arguments.items():
                assert name in fresh or str(value) in told, (task.prompt, step)
            tool = {method.__name__: method for method in world.tools()}[step.tool]
            told += str(tool(**step.arguments)) + str(step.arguments)


@pytest.mark.parametrize("domain", WORLDS)
def test_refused_call_changes_nothing(domain):
    for task in tasks(domain, 10):
        world = build_initial_world(task)
        for step in (step for step in task.calls if step.tool in WRITES[domain]):
            wrong = make_call(
                step.tool, **{name: "?" if isinstance(value, str) else -1 for name, value in step.arguments.items()}
            )
            with pytest.raises(ActionRefused):
                world.apply_calls([wrong])
        assert plain(world) == task.database


@pytest.mark.parametrize("domain", WORLDS)
def test_every_write_tool_of_a_domain_is_used(domain):
    asked = {step.tool for task in tasks(domain, 150) for step in task.calls}
    assert WRITES[domain] <= asked


async def test_agent_can_continue_after_tool_errors():
    taskset, (task,) = GeneralAgent(), tasks("library", 1)
    wrong = [
        make_tool_call("find_member", name="Nobody"),
        make_tool_call("pay_fine"),
        make_tool_call("burn_book", book_id="B0"),
        Message("assistant", tool_calls=(ToolCall("x", "find_book", "{not json"),)),
    ]
    trace = await play(taskset, task, [*wrong, *taskset.gold(task)])
    assert all(text.startswith("error:") for text in get_texts(trace, "tool")[:4])
    assert "no member called 'Nobody'" in get_texts(trace, "tool")[0]
    assert trace.reward == 1.0


async def test_rollouts_of_a_task_do_not_share_a_world():
    taskset, (task,) = GeneralAgent(), tasks("shop", 1)
    assert (await play(taskset, task, taskset.gold(task))).reward == 1.0
    assert (await play(taskset, task, "Done.")).reward == 0.0
    assert (await play(taskset, task, taskset.gold(task))).reward == 1.0


def test_several_goals_are_numbered():
    (task,) = tasks("hotel", 1, min_goals=3, max_goals=3)
    assert [line[:2] for line in task.prompt.splitlines()] == ["1.", "2.", "3."]


async def test_final_database_is_stored_in_the_trace():
    taskset, (task,) = GeneralAgent(), tasks("tickets", 1)
    assert (await play(taskset, task, taskset.gold(task))).info["database"] == plain(build_goal_world(task))
