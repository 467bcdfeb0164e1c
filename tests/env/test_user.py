"""Simulated users: scripted ones, and models that see the conversation with roles swapped."""

import pytest

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env import ChatClient, ChatClientConfig, ModelUser, Task, User
from ramify.infer.gateway import Endpoint
from ramify.trace import Message
from tests.support.engine import ScriptedEngine, run_engine
from tests.support.rollout_context import make_context


@pytest.fixture(scope="module")
def server():
    with run_engine(ScriptedEngine()) as server:
        yield server


class Counting(User):
    def respond(self, reply, turn, task, state):
        state.replies = [*getattr(state, "replies", []), reply]
        return f"{task.prompt} {turn}" if turn < 2 else None


async def test_user_speaks_until_it_returns_none():
    context = make_context(Task(prompt="more"))

    user = Counting()
    messages = [await user.next_message(context, reply=reply, turn=turn) for turn, reply in enumerate([None, "a", "b"])]
    assert messages == [Message("user", "more 0"), Message("user", "more 1"), None]
    assert context.state.replies == [None, "a", "b"]


async def test_user_may_be_async_and_return_a_message():
    class Polite(User):
        async def respond(self, reply):
            return Message("user", f"thanks for {reply}")

    assert await Polite().next_message(make_context(), reply="this", turn=1) == Message("user", "thanks for this")


async def test_invalid_parameters_and_results_of_respond_are_refused():
    class Wrong(User):
        def respond(self, replly):
            return ""

    class Odd(User):
        def respond(self):
            return 3

    with pytest.raises(ConfigInvalid, match=r"Wrong\.respond.*'replly'.*did you mean reply\?"):
        await Wrong().next_message(make_context(), reply=None, turn=0)
    with pytest.raises(EnvironmentFault, match=r"Odd\.respond.*found a int"):
        await Odd().next_message(make_context(), reply=None, turn=0)


async def test_model_user_sees_the_conversation_with_roles_swapped(server):
    server.reset(["I want a room.", "With a view.", "Fine. DONE"])
    context = make_context()
    user = ModelUser("You want a room.", ChatClient(ChatClientConfig(base_url=f"{server.url}/v1", model="guest")))

    assert await user.next_message(context, reply=None, turn=0) == Message("user", "I want a room.")
    assert await user.next_message(context, reply="Which one?", turn=1) == Message("user", "With a view.")
    assert await user.next_message(context, reply="Booked.", turn=2) is None
    replies = [(message["role"], message["content"]) for message in server.requests[-1]["messages"]]
    assert replies[0] == ("system", "You want a room.")
    assert replies[2:] == [
        ("assistant", "I want a room."),
        ("user", "Which one?"),
        ("assistant", "With a view."),
        ("user", "Booked."),
    ]
    assert context.trace.info["user"] == {"calls": 3, "prompt": 30, "completion": 9}


async def test_policy_plays_the_user_without_a_client(server):
    server.reset(["hi"])
    context = make_context(endpoint=Endpoint(f"{server.url}/v1", "secret", "policy"))
    assert await ModelUser("Say hi.").next_message(context, reply=None, turn=0) == Message("user", "hi")
    assert (server.requests[0]["model"], server.api_keys) == ("policy", ["Bearer secret"])
    assert "user" not in context.trace.info  # its calls are the rollout's own
    with pytest.raises(ConfigInvalid, match="no endpoint"):
        await ModelUser("Say hi.").next_message(make_context(), reply=None, turn=0)
