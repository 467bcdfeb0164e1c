"""A policy that says what it was told to say: it needs no model and is as exact as one."""

from collections.abc import Mapping, Sequence

from ramify.client import ClientSampling
from ramify.client.stall_clock import StallClock
from ramify.errors import EnvironmentFault, RamifyError
from ramify.gateway.policy import NO_TOKENS, PreparedPrompt, SampledReply
from ramify.render import TokenHistory, ToolSchema
from ramify.render.outline import ConversationOutline
from ramify.trace import Media, Message, MessageSpan, Usage


class ScriptedPolicy:
    """Answers with these replies, one after another. After the last one, a call raises `exhausted`."""

    name = "scripted"
    trainable = False
    max_model_len = None

    def __init__(
        self, replies: Sequence[str | Message] = (), exhausted_error: type[RamifyError] = EnvironmentFault
    ) -> None:
        self.replies: list[str | Message] = list(replies)
        self.exhausted_error = exhausted_error
        self.num_played = 0

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages unchanged."""
        return messages

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        media: Mapping[str, Media] | None = None,
    ) -> PreparedPrompt:
        """The conversation as it is."""
        conversation = (*(history.messages if history else ()), *messages)
        return PreparedPrompt(
            conversation, tuple(tools), tuple(MessageSpan(message, 0, (0, 0)) for message in messages)
        )

    async def sample(
        self,
        prepared: PreparedPrompt,
        sampling: ClientSampling,
        *,
        session: str,
        timeout: float,
        stop_strings: Sequence[str] = (),
        clock: StallClock | None = None,
    ) -> SampledReply:
        """The next reply."""
        if self.num_played == len(self.replies):
            count = "1 reply" if self.num_played == 1 else f"{self.num_played} replies"
            raise self.exhausted_error(f"the script has {count}, and the conversation goes on")
        reply = self.replies[self.num_played]
        self.num_played += 1
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        history = TokenHistory((*prepared.messages, message), prepared.tools, NO_TOKENS, 0, ConversationOutline())
        return SampledReply(message, "stop", Usage(), history)
