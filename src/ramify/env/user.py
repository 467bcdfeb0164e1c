"""Simulated users: who speaks to the agent between its replies.

A user answers a reply, or ends the conversation with None. It is asked before the first turn too (`reply` is None)
where the task has no prompt: then the user opens. One `User` object belongs to one rollout and may remember what it
likes.
"""

from typing import Any

from ramify.env.calling import Hook
from ramify.env.chat import Chat, ChatConfig, count
from ramify.env.context import OFFERED, Context, Endpoint
from ramify.errors import ConfigInvalid, EnvironmentFault
from ramify.trace import Message, Trace

OPENING = "(The conversation begins. Say your first words.)"  # what a model that plays the user hears first

_OFFERED = ("reply", "turn", *OFFERED)


class User:
    """A scripted user: a subclass says what it answers."""

    respond: Any
    """`def respond(self, reply, turn, ...) -> str | Message | None`, sync or async. It names what it wants of

    - `reply`: the text of the agent's last reply, None where the user opens the conversation;
    - `turn`: how many replies the user has heard, this one included. It is 0 where the user opens the conversation, 1
      at the first reply. A reply that calls tools is answered by the tools: the user does not hear it;
    - the fields of `Context`."""

    async def speak(self, context: Context, *, reply: str | None, turn: int) -> Message | None:
        """What the user says next, None when it has nothing more to say."""
        hook = Hook(self.respond, type(self).__name__, offered=_OFFERED)
        said = await hook(context, reply=reply, turn=turn)
        if said is None or isinstance(said, Message):
            return said
        if isinstance(said, str):
            return Message(role="user", content=said)
        raise EnvironmentFault(
            f"{type(self).__name__}.respond: expected str, Message or None, found a {type(said).__qualname__}"
        )


class ModelUser(User):
    """Another model plays the user, from instructions, until it says `stop`.

    It sees the conversation from the other side: the agent's replies are what it is told. Without a model of its own
    the policy plays both sides, and the user's calls are branches of the rollout.
    """

    def __init__(self, instructions: str, chat: Chat | None = None, *, stop: str = "DONE") -> None:
        self.instructions = instructions
        self.stop = stop
        self._chat = chat
        self._messages = [{"role": "system", "content": instructions}]

    async def respond(self, reply: str | None, trace: Trace, endpoint: Endpoint | None) -> str | None:
        heard = OPENING if reply is None else reply
        self._messages.append({"role": "user", "content": heard})
        said = await (self._chat or _policy(endpoint)).ask(self._messages)
        if self._chat is not None:
            count(trace, "user", said.usage)
        if self.stop in said.text:
            return None
        self._messages.append({"role": "assistant", "content": said.text})
        return said.text


def _policy(endpoint: Endpoint | None) -> Chat:
    if endpoint is None:
        raise ConfigInvalid(
            "ModelUser: give it a Chat; this rollout has no endpoint at which the policy could play the user"
        )
    return Chat(ChatConfig(base_url=endpoint.base_url, model=endpoint.model), api_key=endpoint.api_key)
