"""A plain chat with a model that is not trained here: a judge, or whoever plays the user.

Any OpenAI-compatible endpoint will do. A call opens its own connection: such calls take seconds, and a client shared by
many rollouts would have to be closed by one of them.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from ramify.config import Config
from ramify.errors import ConfigInvalid, ProviderError
from ramify.trace import Trace, Usage

if TYPE_CHECKING:
    import httpx

EXCERPT_CHARS = 300  # characters of an answer that are shown
RETRYABLE_STATUS_CODES = (408, 409, 429, 500, 502, 503, 504)
INITIAL_BACKOFF = 0.5  # seconds before the first repetition, doubled each time


class ChatClientConfig(Config):
    """Which model, and where it is."""

    base_url: str
    """Ends in `/v1`, as OpenAI's clients want it."""
    model: str
    api_key_env: str | None = None
    """The environment variable that holds the key; none is sent without it."""
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout: float = Field(default=120.0, gt=0)
    """Seconds a call may take, its repetitions included."""
    retries: int = Field(default=2, ge=0)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """An answer and what it cost."""

    text: str
    usage: Usage


class ChatClient:
    """Asks one model."""

    def __init__(self, config: ChatClientConfig, *, api_key: str | None = None) -> None:
        self.config = config
        if config.api_key_env is not None:
            api_key = os.environ.get(config.api_key_env)
            if not api_key:
                raise ConfigInvalid(f"api_key_env: the environment variable {config.api_key_env} is not set")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> ChatCompletion:
        """The model's answer; raises ProviderError if there is none in time."""
        import httpx  # a third of the time it takes to load an environment, of which few ask another model

        config, url = self.config, f"{self.config.base_url.rstrip('/')}/chat/completions"
        body = {"model": config.model, "messages": list(messages)}
        body |= {name: v for name in ("temperature", "max_tokens") if (v := getattr(config, name)) is not None}
        verify = _ssl_context() if url.startswith("https:") else False
        try:
            async with (
                asyncio.timeout(config.timeout),
                httpx.AsyncClient(headers=self._headers, verify=verify, timeout=None, trust_env=False) as http_client,
            ):
                return _parse_completion(url, await self._post_with_retries(http_client, url, body))
        except TimeoutError:
            raise ProviderError(f"{url} did not answer in {config.timeout:g} s") from None

    async def _post_with_retries(
        self, http_client: "httpx.AsyncClient", url: str, body: dict[str, Any]
    ) -> "httpx.Response":
        """The answer, asked for again after failures that may pass."""
        import httpx

        for retry in range(self.config.retries + 1):
            try:
                response = await http_client.post(url, json=body)
                if response.status_code == 200:
                    return response
                problem = f"answered {response.status_code}: {response.text[:EXCERPT_CHARS]}"
                is_transient = response.status_code in RETRYABLE_STATUS_CODES
            except httpx.TransportError as error:
                problem, is_transient = f"{type(error).__name__}: {error}", True
            if not is_transient or retry == self.config.retries:
                raise ProviderError(f"{url}: {problem}")
            await asyncio.sleep(INITIAL_BACKOFF * 2**retry)
        raise AssertionError("the last repetition answers or raises")


def add_usage(trace: Trace, role: str, usage: Usage) -> None:
    """Add what a call cost to `trace.info[role]`: these tokens are nobody's rollout, but somebody pays for them."""
    before = trace.info.get(role, {})
    cost = {"calls": 1, "prompt": usage.prompt_tokens, "completion": usage.completion_tokens}
    trace.info[role] = {**before, **{name: before.get(name, 0) + n for name, n in cost.items()}}


def _parse_completion(url: str, response: "httpx.Response") -> ChatCompletion:
    try:
        body = msgspec.json.decode(response.content)
        text, usage = body["choices"][0]["message"]["content"], body.get("usage") or {}
        counts = Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ProviderError(f"{url}: not a chat completion: {response.text[:EXCERPT_CHARS]}") from error
    return ChatCompletion(text or "", counts)


@cache
def _ssl_context() -> ssl.SSLContext:
    """Reading the certificates takes longer than a call to a local server."""
    return ssl.create_default_context()
