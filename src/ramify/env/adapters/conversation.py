"""A conversation with the policy, for environments that answer each reply with a message."""

from collections.abc import Mapping, Sequence
from typing import Any

import ramify as rf
from ramify.core.errors import ProviderError
from ramify.infer.dialects.chat_format import format_message

CALL_TIMEOUT = 86400.0  # seconds; the timeout of the harness ends a rollout, and the gateway a call
POLICY_REFUSALS = ("BudgetExceeded", "ContextOverflow")  # the policy's failures: the rollout counts


class PolicyConversation:
    """One conversation of a rollout over its endpoint.

    - `tools`: the tools that the policy may call.
    - `stop`: the limit that ended the conversation; empty while it goes on.
    """

    def __init__(self, endpoint: rf.Endpoint, trace: rf.Trace, system: str = "") -> None:
        config = rf.ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model, timeout=CALL_TIMEOUT, retries=0)
        self._client = rf.ChatClient(config, api_key=endpoint.api_key)
        self._trace = trace
        self._messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.stop = ""

    async def send(self, message: str) -> str | None:
        """Send a user message and return the reply; None if a limit of the rollout allows no further call."""
        reply = await self.send_messages([{"role": "user", "content": message}])
        return None if reply is None else reply.text

    async def send_messages(self, messages: Sequence[Mapping[str, Any]]) -> rf.Message | None:
        """Send messages, such as tool results, and return the reply; None if a limit allows no further call."""
        self._messages += messages
        try:
            completion = await self._client.complete(self._messages, self.tools)
        except ProviderError:
            refusal = find_policy_refusal(self._trace)
            if refusal is None:
                raise
            self.stop = refusal
            return None
        self._messages.append(format_message(completion.message, with_reasoning=False))
        return completion.message


def find_policy_refusal(trace: rf.Trace) -> str | None:
    """Return the limit that ended the rollout; None if no call was refused. Raises ProviderError for other refusals."""
    refusals = trace.info.get("refusals", [])
    if not refusals:
        return None
    last = refusals[-1]
    if last["name"] in POLICY_REFUSALS:
        return last["name"]
    raise ProviderError(f"a model call failed: {last['name']}: {last['message']}")
