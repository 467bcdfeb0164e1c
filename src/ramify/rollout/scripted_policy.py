"""A policy that replays a fixed list of replies, without a model."""

import asyncio
from collections.abc import Iterable, Sequence

from ramify.core.errors import EnvironmentFault, RamifyError
from ramify.infer.gateway.policy import MessagePolicy, PolicyRequest, SampledReply
from ramify.model.images import decode_image
from ramify.trace import Media, Message, Usage


class ScriptedPolicy(MessagePolicy):
    """Answers with the given replies, one after another. After the last one, a call raises `exhausted_error`."""

    name = "scripted"

    def __init__(
        self, replies: Sequence[str | Message] = (), exhausted_error: type[RamifyError] = EnvironmentFault
    ) -> None:
        self.replies: list[str | Message] = list(replies)
        self.exhausted_error = exhausted_error
        self.num_played = 0

    async def process_images(self, images: Iterable[Media]) -> None:
        """Decode images as a policy with a vision model does. Raises ImageInvalid."""
        for image in images:
            await asyncio.to_thread(decode_image, image.data)

    async def sample(self, request: PolicyRequest) -> SampledReply:
        """Return the next reply."""
        if self.num_played == len(self.replies):
            count = "1 reply" if self.num_played == 1 else f"{self.num_played} replies"
            raise self.exhausted_error(f"the script has {count}, but the conversation is not over")
        reply = self.replies[self.num_played]
        self.num_played += 1
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        return self._build_reply(request.prompt, message, "stop", Usage())
