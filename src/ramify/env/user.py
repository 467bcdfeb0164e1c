"""Simulated users: who speaks to the agent between its replies.

A user answers a reply, or ends the conversation with None. It is asked before the first turn too (`reply` is None)
where the task has no prompt: then the user opens. One `User` object belongs to one rollout and may remember what it
likes.
"""

from typing import Any

from ramify.env.chat_client import ChatClient, ChatClientConfig, add_usage
from ramify.env.context import CONTEXT_FIELDS, Endpoint, RolloutContext
from ramify.env.hook import Hook
from ramify.errors import ConfigInvalid, EnvironmentFault
from ramify.trace import Message, Trace

FIRST_PROMPT = "(The conversation begins. Say your first words.)"  # what a model that plays the user hears first

_RESPOND_PARAMETERS = ("reply", "turn", *CONTEXT_FIELDS)


class User:
    """A scripted user: a subclass says what it answers."""

    respond: Any
    """`def respond(self, reply, turn, ...) -> str | Message | None`, sync or async. It names what it wants of

    - `reply`: the text of the agent's last reply, None where the user opens the conversation;
    - `turn`: how many replies the user has heard, this one included. It is 0 where the user opens the conversation, 1
      at the first reply. A reply that calls tools is answered by the tools: the user does not hear it;
    - the fields of `Context`."""

    async def next_message(self, context: RolloutContext, *, reply: str | None, turn: int) -> Message | None:
        """What the user says next, None when it has nothing more to say."""
        hook = Hook(self.respond, type(self).__name__, available=_RESPOND_PARAMETERS)
        message = await hook(context, reply=reply, turn=turn)
        if message is None or isinstance(message, Message):
            return message
        if isinstance(message, str):
            return Message(role="user", content=message)
        raise EnvironmentFault(
            f"{type(self).__name__}.respond: expected str, Message or None, found a {type(message).__qualname__}"
        )


class ModelUser(User):
    """Another model plays the user, from instructions, until it says `stop`.

    It sees the conversation from the other side: the agent's replies are what it is told. Without a model of its own
    the policy plays both sides, and the user's calls are branches of the rollout.
    """

    def __init__(self, instructions: str, client: ChatClient | None = None, *, stop: str = "DONE") -> None:
        self.instructions = instructions
        self.stop = stop
        self._client = client
        self._messages = [{"role": "system", "content": instructions}]

    async def respond(self, reply: str | None, trace: Trace, endpoint: Endpoint | None) -> str | None:
        content = FIRST_PROMPT if reply is None else reply
        self._messages.append({"role": "user", "content": content})
        message = await (self._client or _policy_chat_client(endpoint)).complete(self._messages)
        if self._client is not None:
            add_usage(trace, "user", message.usage)
        if self.stop in message.text:
            return None
        self._messages.append({"role": "assistant", "content": message.text})
        return message.text


def _policy_chat_client(endpoint: Endpoint | None) -> ChatClient:
    if endpoint is None:
        raise ConfigInvalid(
            "ModelUser: give it a Chat; this rollout has no endpoint at which the policy could play the user"
        )
    return ChatClient(ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model), api_key=endpoint.api_key)
