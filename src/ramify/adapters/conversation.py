"""A conversation with the policy, for environments that answer each reply with a message."""

import ramify as rf
from ramify.adapters.refusals import find_policy_refusal
from ramify.errors import ProviderError

CALL_TIMEOUT = 86400.0  # seconds; the timeout of the harness ends a rollout, and the gateway a call


class PolicyConversation:
    """One conversation of a rollout over its endpoint.

    - `stop`: the limit that ended the conversation; empty while it goes on.
    """

    def __init__(self, endpoint: rf.Endpoint, trace: rf.Trace, system: str = "") -> None:
        config = rf.ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model, timeout=CALL_TIMEOUT, retries=0)
        self._client = rf.ChatClient(config, api_key=endpoint.api_key)
        self._trace = trace
        self._messages = [{"role": "system", "content": system}] if system else []
        self.stop = ""

    async def send(self, message: str) -> str | None:
        """Send a user message and return the reply; None if a limit of the rollout allows no further call."""
        self._messages.append({"role": "user", "content": message})
        try:
            completion = await self._client.complete(self._messages)
        except ProviderError:
            refusal = find_policy_refusal(self._trace)
            if refusal is None:
                raise
            self.stop = refusal
            return None
        self._messages.append({"role": "assistant", "content": completion.text})
        return completion.text
