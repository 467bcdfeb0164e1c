"""Users: scripted ones name what they want; another model can play one, and sees the conversation from its side."""

import pytest

from ramify.env import ChatClient, ChatClientConfig, Endpoint, ModelUser, Task, User
from ramify.errors import ConfigInvalid, EnvironmentFault
from ramify.trace import Message
from tests.env.context import context, run
from tests.env.serving import chat_server


@pytest.fixture(scope="module")
def server():
    with chat_server() as found:
        yield found


class Counting(User):
    def respond(self, reply, turn, task, state):
        state.heard = [*getattr(state, "heard", []), reply]
        return f"{task.prompt} {turn}" if turn < 2 else None


def test_a_scripted_user_speaks_until_it_returns_none():
    here = context(Task(prompt="more"))

    async def test():
        user = Counting()
        said = [await user.next_message(here, reply=reply, turn=turn) for turn, reply in enumerate([None, "a", "b"])]
        assert said == [Message("user", "more 0"), Message("user", "more 1"), None]

    run(test())
    assert here.state.heard == [None, "a", "b"]


def test_a_user_may_be_async_and_answer_with_a_message():
    class Polite(User):
        async def respond(self, reply):
            return Message("user", f"thanks for {reply}")

    assert run(Polite().next_message(context(), reply="this", turn=1)) == Message("user", "thanks for this")


def test_a_user_that_names_or_returns_something_else_is_named():
    class Wrong(User):
        def respond(self, replly):
            return ""

    class Odd(User):
        def respond(self):
            return 3

    with pytest.raises(ConfigInvalid, match=r"Wrong\.respond.*'replly'.*did you mean reply\?"):
        run(Wrong().next_message(context(), reply=None, turn=0))
    with pytest.raises(EnvironmentFault, match=r"Odd\.respond.*found a int"):
        run(Odd().next_message(context(), reply=None, turn=0))


def test_a_model_plays_the_user_from_the_other_side(server):
    answers = iter(["I want a room.", "With a view.", "Fine. DONE"])
    server.reset(lambda body: next(answers))
    here = context()
    user = ModelUser("You want a room.", ChatClient(ChatClientConfig(base_url=server.url, model="guest")))

    async def test():
        assert await user.next_message(here, reply=None, turn=0) == Message("user", "I want a room.")
        assert await user.next_message(here, reply="Which one?", turn=1) == Message("user", "With a view.")
        assert await user.next_message(here, reply="Booked.", turn=2) is None

    run(test())
    heard = [(message["role"], message["content"]) for message in server.asked[-1]["messages"]]
    assert heard[0] == ("system", "You want a room.")
    assert heard[2:] == [
        ("assistant", "I want a room."),
        ("user", "Which one?"),
        ("assistant", "With a view."),
        ("user", "Booked."),
    ]
    assert here.trace.info["user"] == {"calls": 3, "prompt": 30, "completion": 9}


def test_without_a_model_of_its_own_the_policy_plays_the_user(server):
    server.reset(lambda body: "hi")
    here = context(endpoint=Endpoint(server.url, "secret", "policy"))
    assert run(ModelUser("Say hi.").next_message(here, reply=None, turn=0)) == Message("user", "hi")
    assert (server.asked[0]["model"], server.keys) == ("policy", ["Bearer secret"])
    assert "user" not in here.trace.info  # its calls are the rollout's own
    with pytest.raises(ConfigInvalid, match="no endpoint"):
        run(ModelUser("Say hi.").next_message(context(), reply=None, turn=0))
