"""Simulated users, who answer the agent's replies.

A user answers a reply with a message, or ends the conversation with None. If the task has no prompt, the user also
speaks first: it is called with `reply=None`. Each rollout has its own `User` object, which may keep state.
"""

from typing import Any

from ramify.core.config.schema import is_list, is_tuple
from ramify.core.errors import ConfigInvalid, EnvironmentFault, RamifyError
from ramify.env.chat_client import ChatClient, ChatClientConfig
from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.hook import Hook
from ramify.infer.dialects.media import MEDIA_ADVICE, read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.gateway.config import Endpoint
from ramify.trace import Media, Message, Trace, Usage

FIRST_PROMPT = "(The conversation begins. Say your first words.)"  # the first message to a model that plays the user

_RESPOND_PARAMETERS = ("reply", "turn", *CONTEXT_FIELDS)


class User:
    """Base class of simulated users.

    A subclass implements `respond`, sync or async. It returns a text, a list of texts, images (`Media`) and parts in
    OpenAI's format, one image, a Message, or None to end the conversation. It may name the parameters

    - `reply`: the text of the agent's last reply; None if the user starts the conversation;
    - `turn`: the number of replies that the user has received, this one included: 0 if the user starts the
      conversation, 1 at the first reply. A reply with tool calls goes to the tools, not to the user;
    - the fields of `RolloutContext`.
    """

    respond: Any

    async def next_message(self, context: RolloutContext, *, reply: str | None, turn: int) -> Message | None:
        """Return the user's next message, or None to end the conversation."""
        hook = Hook(self.respond, type(self).__name__, available=_RESPOND_PARAMETERS)
        message = await hook(context, reply=reply, turn=turn)
        if message is None or isinstance(message, Message):
            return message
        if isinstance(message, str):
            return Message(role="user", content=message)
        if is_list(message) or is_tuple(message) or isinstance(message, Media):
            return self._parse_parts(message, context)
        raise EnvironmentFault(
            f"{type(self).__name__}.respond: expected str, list, Media, Message or None, found a "
            f"{type(message).__qualname__}; {MEDIA_ADVICE}"
        )

    def _parse_parts(self, parts: Any, context: RolloutContext) -> Message:
        """Return a message of parts, and add its images to the trace."""
        parser = MessageParser(read_url=read_environment_url)
        try:
            content = parser.parse_content(parts)
        except RamifyError as error:
            raise EnvironmentFault(f"{type(self).__name__}.respond: {error.message}") from error
        for image in parser.media.values():
            context.trace.add_media(image)
        return Message(role="user", content=content)


async def ask_user(user: User | None, context: RolloutContext, *, reply: str | None, turn: int) -> Message | None:
    """Return the user's next message, or None to end the conversation.

    Raises ConfigInvalid if the rollout has no user, who should have spoken first.
    """
    if user is None:
        raise ConfigInvalid(
            f"task {context.task.identity} has no prompt, and the `user` hook returned no user to speak first"
        )
    return await user.next_message(context, reply=reply, turn=turn)


class ModelUser(User):
    """A user played by a model with `instructions`, until its reply contains `stop`.

    It sees the conversation with roles swapped: the agent's replies are its user messages. Without a `client`, the
    policy plays both sides, and the user's calls are branches of the rollout.
    """

    def __init__(self, instructions: str, client: ChatClient | None = None, *, stop: str = "DONE") -> None:
        self.stop = stop
        self._client = client
        self._messages = [{"role": "system", "content": instructions}]

    async def respond(self, reply: str | None, trace: Trace, endpoint: Endpoint | None) -> str | None:
        """Return the model's next message, or None if it contains `stop`."""
        content = FIRST_PROMPT if reply is None else reply
        self._messages.append({"role": "user", "content": content})
        completion = await (self._client or _policy_chat_client(endpoint)).complete(self._messages)
        if self._client is not None:
            _add_usage(trace, completion.usage)
        if self.stop in completion.text:
            return None
        self._messages.append({"role": "assistant", "content": completion.text})
        return completion.text


def _add_usage(trace: Trace, usage: Usage) -> None:
    """Add a call's token usage to `trace.info["user"]`. These tokens belong to no rollout, but they are paid for."""
    totals = trace.info.get("user", {})
    counts = {"calls": 1, "prompt": usage.prompt_tokens, "completion": usage.completion_tokens}
    trace.info["user"] = {**totals, **{name: totals.get(name, 0) + count for name, count in counts.items()}}


def _policy_chat_client(endpoint: Endpoint | None) -> ChatClient:
    if endpoint is None:
        raise ConfigInvalid(
            "ModelUser: pass a ChatClient; this rollout has no endpoint at which the policy could play the user"
        )
    return ChatClient(ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model), api_key=endpoint.api_key)
