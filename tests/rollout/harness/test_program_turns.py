"""The harness `program` with a simulated user, who answers when the program ends its turn."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.main_calls import HOOK_REASON
from ramify.trace import Trace
from tests.rollout.runtime.conftest import build_runtime_table, skip_unless_available
from tests.support.attempts import OneTask, error_names, list_messages, load_env, run_one
from tests.support.images import make_media

AGENT = (Path(__file__).parent / "turn_agent.py").read_text()
COMMAND = ["python3", "-S", "agent.py", "{turn}"]


class Guest(rf.User):
    """Asks twice more, then ends the conversation."""

    def respond(self, reply: str | None, turn: int, trace: rf.Trace) -> str | None:
        trace.info.setdefault("replies", []).append([turn, reply])
        return f"Now {turn}." if turn < 3 else None


class Talk(OneTask):
    def user(self) -> rf.User | None:
        return Guest()


async def talk(
    script, *, taskset=Talk, runtime: str = "local", max_turns: int | None = None, task: Any = None, **harness: Any
) -> Trace:
    table = {"id": "program", "command": COMMAND, "files": {"agent.py": AGENT}, **harness}
    env = load_env(taskset, harness=table, runtime=build_runtime_table(runtime), max_turns=max_turns)
    async with Gateway() as gateway:
        return await run_one(env, script, *([task] if task else []), gateway=gateway)


# -- the conversation -------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("runtime", ["local", "sandbox", "container"])
async def test_the_users_message_continues_the_programs_conversation_in_one_branch(runtime):
    skip_unless_available(runtime)
    trace = await talk(["a", "b", "c"], runtime=runtime)
    assert not trace.errors
    assert list_messages(trace) == [
        ("user", "Be brief.\n\ngo"),
        ("assistant", "a"),
        ("user", "Now 1."),
        ("assistant", "b"),
        ("user", "Now 2."),
        ("assistant", "c"),
    ]
    assert trace.info["replies"] == [[1, "a"], [2, "b"], [3, "c"]]
    assert len(trace.leaves) == 1
    assert all(trace.nodes[index].is_trainable for index in trace.sampled_nodes)
    assert not [name for name in trace.metrics if name.startswith("render/breaks")]
    assert (trace.stop, trace.num_turns) == ("user", 3)
    assert trace.info["program"]["turn"] == 3
    assert trace.info["program"]["stdout"] == "turn 3: c\n"


@pytest.mark.process
@pytest.mark.parametrize("prompt", ["stdin", "file"])
async def test_arguments_that_continue_are_added_from_the_second_turn_on(prompt):
    command = ["python3", "-S", "agent.py", *(["--file", "{prompt_file}"] if prompt == "file" else [])]
    trace = await talk(["a", "b", "c"], command=command, prompt=prompt, continue_args=["--continue"])
    assert not trace.errors
    assert [text for role, text in list_messages(trace) if role == "user"] == ["Be brief.\n\ngo", "Now 1.", "Now 2."]
    assert len(trace.leaves) == 1


@pytest.mark.process
async def test_the_user_speaks_first_if_the_task_has_no_prompt():
    trace = await talk(["a", "b", "c"], task=rf.Task(system="Be brief."))
    assert not trace.errors
    assert list_messages(trace)[:2] == [("user", "Be brief.\n\nNow 0."), ("assistant", "a")]
    assert trace.info["replies"][0] == [0, None]


@pytest.mark.process
async def test_files_are_written_once_unless_they_hold_the_message():
    read = "cat note.txt question.txt; echo changed > note.txt; python3 -S agent.py {turn} '{prompt}'"
    files = {"agent.py": AGENT, "note.txt": "first\n", "question.txt": "{turn}: {prompt}\n"}
    trace = await talk(["a", "b", "c"], command=["sh", "-c", read], files=files)
    assert trace.info["program"]["stdout"] == "changed\n3: Now 2.\nturn 3: c\n"


@pytest.mark.process
async def test_the_policy_may_play_the_user_and_its_calls_are_not_trained():
    class Played(OneTask):
        def user(self) -> rf.User | None:
            return rf.ModelUser("Ask for a room.")

    trace = await talk(["a", "A room?", "b", "DONE"], taskset=Played)
    assert not trace.errors
    replies = {trace.nodes[index].message.text: trace.nodes[index] for index in trace.sampled_nodes}
    assert [text for text, node in replies.items() if node.is_trainable] == ["a", "b"]
    assert [call["reason"] for call in trace.info["untrained"]] == [HOOK_REASON] * 2
    assert (trace.stop, trace.info["program"]["reply"]) == ("user", "b")


# -- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_max_turns_ends_the_conversation():
    trace = await talk(["a", "b", "c"], max_turns=2)
    assert (trace.stop, trace.num_turns, trace.errors) == ("max_turns", 2, [])
    assert trace.info["replies"] == [[1, "a"], [2, "b"]]


@pytest.mark.process
async def test_the_timeout_ends_a_user_that_does_not_answer():
    class Silent(rf.User):
        async def respond(self) -> str | None:
            await asyncio.sleep(1000)

    class Waiting(OneTask):
        def user(self) -> rf.User | None:
            return Silent()

    trace = await talk(["a"], taskset=Waiting, timeout=1.0)
    assert error_names(trace) == ["BudgetExceeded"]


@pytest.mark.process
async def test_a_program_that_fails_in_a_later_turn_is_scored():
    trace = await talk(["a", "b"], command=["sh", "-c", "python3 -S agent.py {turn} '{prompt}'; exit $(({turn} - 1))"])
    assert (trace.stop, trace.errors, trace.info["program"]["exit_code"]) == ("exit", [], 1)
    assert trace.info["replies"] == [[1, "a"]]


@pytest.mark.process
async def test_a_turn_without_a_reply_ends_the_conversation():
    trace = await talk(["a"], command=["sh", "-c", "[ {turn} -gt 1 ] || python3 -S agent.py {turn} '{prompt}'"])
    assert (trace.stop, trace.errors, trace.num_turns) == ("done", [], 1)
    assert trace.info["replies"] == [[1, "a"]]


@pytest.mark.process
async def test_an_image_of_the_user_is_a_fault_of_the_environment():
    class Painter(rf.User):
        def respond(self) -> list[Any]:
            return ["Look.", make_media(8, 8)]

    class Painting(OneTask):
        def user(self) -> rf.User | None:
            return Painter()

    trace = await talk(["a"], taskset=Painting)
    assert error_names(trace) == ["EnvironmentFault"]
    assert "the user's message has an image, and a program gets its messages as text" in trace.errors[0].message


# -- refusals before the first rollout --------------------------------------------------------------------------------


@pytest.mark.parametrize("harness", [{"id": "program", "command": ["agent"]}, {"id": "mini-swe-agent"}])
def test_a_program_that_cannot_continue_its_conversation_is_refused(harness):
    with pytest.raises(ConfigInvalid, match=r"`user` hook.*harness.continue_args.*\{turn\}"):
        load_env(Talk, harness=harness)
