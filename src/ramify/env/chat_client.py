"""A chat client for models that are not trained: judges and simulated users.

It works with any OpenAI-compatible endpoint. Each call opens its own connection: calls take seconds, and a shared
connection would need an owner that closes it.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from ramify.core.async_calls import retry
from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.trace import Message, Usage

if TYPE_CHECKING:
    from ramify.infer.client.http_client import HttpResponse

EXCERPT_CHARS = 300  # of a response, in error messages
RUN_MODEL_PREFIX = "models."  # of a `base_url` that names a model of the run
COMPLETIONS_PATH = "/chat/completions"
SCHEMA_STATUS_CODES = (400, 422)  # with which endpoints refuse a `response_format`
RETRYABLE_STATUS_CODES = (408, 409, 429, 500, 502, 503, 504)
CONNECT_TIMEOUT = 10.0  # seconds to open a connection
INITIAL_BACKOFF = 0.5  # seconds before the first retry, doubled for each further one


class ExternalModelConfig(Config):
    """A model other than the policy, and the OpenAI-compatible endpoint that serves it.

    - `base_url`: the address; it ends in `/v1`, as in OpenAI's clients. `models.NAME` stands for the address of the
      model `[models.NAME]` of the run.
    - `model`: the name of the model at the endpoint. A model of the run needs none.
    - `api_key_env`: the environment variable that holds the API key. None: no key is sent.
    """

    base_url: str
    model: str = ""
    api_key_env: str | None = None

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield a missing name of a model that is not one of the run's."""
        if not self.model and not self.base_url.startswith(RUN_MODEL_PREFIX):
            yield "model", "required, the name of the model at the endpoint"

    def resolve(self) -> tuple[str, str]:
        """Return address and model. Raises ConfigInvalid if the run has no such model.

        The address of a model of the run is in the environment, not in the config: it changes when a run is resumed.
        """
        if not self.base_url.startswith(RUN_MODEL_PREFIX):
            return self.base_url, self.model
        name = self.base_url.removeprefix(RUN_MODEL_PREFIX)
        address, _, served_model = os.environ.get(get_model_variable(name), "").partition(" ")
        if not address:
            raise ConfigInvalid(f"base_url: the run has no [models.{name}], or this process is not part of a run")
        return f"{address}/v1", self.model or served_model


def get_model_variable(name: str) -> str:
    """Return the environment variable with the address and the name of a model of the run, separated by a space."""
    return f"RAMIFY_MODEL_{name.upper().replace('-', '_')}"


def set_model_address(name: str, urls: Sequence[str]) -> None:
    """Let this process reach a model of the run at the first of these addresses, if it could reach the model before."""
    variable = get_model_variable(name)
    if urls and variable in os.environ:
        _, _, served_model = os.environ[variable].partition(" ")
        os.environ[variable] = f"{urls[0]} {served_model}"


class ChatClientConfig(ExternalModelConfig):
    """A model other than the policy with its endpoint (`base_url`, `model`, `api_key_env`), and how it is called.

    - `temperature`, `max_tokens`: sampling parameters. None: the defaults of the endpoint.
    - `timeout`: seconds that a call may take, including its retries, once it may start.
    - `retries`: retries after transient failures.
    - `concurrency`: maximum calls in flight, in each process.
    - `requests_per_minute`: maximum calls that start per minute, in each process; retries do not count. None: no limit.
    """

    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout: float = Field(default=120.0, gt=0)
    retries: int = Field(default=2, ge=0)
    concurrency: int = Field(default=32, ge=1)
    requests_per_minute: float | None = Field(default=None, gt=0)


def read_api_key(variable: str | None, config_key: str) -> str:
    """Return the API key in an environment variable; "" if no variable is named.

    Raises ConfigInvalid, with the name of the config key, if the variable is not set.
    """
    if variable is None:
        return ""
    if not (key := os.environ.get(variable)):
        raise ConfigInvalid(f"{config_key}: the environment variable {variable} is not set")
    return key


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The text of a completion, its token usage, the message, which may have tool calls, and the seconds it took."""

    text: str
    usage: Usage
    message: Message
    seconds: float


class CallPacer:
    """Spaces calls evenly, at most `requests_per_minute` of them; None: they start at once."""

    def __init__(self, requests_per_minute: float | None) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0

    def reserve(self, now: float) -> float:
        """Reserve the next start, and return the seconds until then; `now` is a monotonic time."""
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        return start - now

    async def wait_turn(self) -> None:
        """Wait until the next call may start."""
        if self._interval:
            await asyncio.sleep(self.reserve(time.monotonic()))


class ChatClient:
    """Sends chat completion requests to one model; `config` describes the model."""

    def __init__(self, config: ChatClientConfig, *, api_key: str | None = None) -> None:
        self.config = config
        api_key = read_api_key(config.api_key_env, "api_key_env") or api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._slots, self._pacer = asyncio.Semaphore(config.concurrency), CallPacer(config.requests_per_minute)
        self._takes_schema = True

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        schema: Mapping[str, Any] | None = None,
    ) -> ChatCompletion:
        """Return the model's reply, which follows a JSON schema if the endpoint takes one.

        Raises ProviderError if all retries fail or the timeout passes.
        """
        config, (base_url, model) = self.config, self.config.resolve()
        body: dict[str, Any] = {"model": model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        body |= {name: v for name in ("temperature", "max_tokens") if (v := getattr(config, name)) is not None}
        async with self._slots:
            await self._pacer.wait_turn()
            start = time.monotonic()
            try:
                async with asyncio.timeout(config.timeout):
                    message, usage = await self._request_reply(body, schema)
            except TimeoutError:
                raise ProviderError(f"{base_url} did not answer within {config.timeout:g} s") from None
            return ChatCompletion(message.text, usage, message, time.monotonic() - start)

    async def _request_reply(self, body: Mapping[str, Any], schema: Mapping[str, Any] | None) -> tuple[Message, Usage]:
        """Return the reply, requested with the schema unless the endpoint refuses it."""
        from ramify.infer.dialects.chat_format import parse_chat_completion  # slow to load; few environments need it

        uses_schema = schema is not None and self._takes_schema
        json_schema = {"name": "reply", "strict": True, "schema": schema}
        response_format = {"response_format": {"type": "json_schema", "json_schema": json_schema}}
        url, response = await self._post_with_retries({**body, **response_format} if uses_schema else body)
        if uses_schema and response.status in SCHEMA_STATUS_CODES:
            url, response = await self._post_with_retries(body)
            self._takes_schema = response.status != 200  # if this is refused too, the schema was not the reason
        if response.status != 200:
            raise _status_error(url, response)
        message, _, usage = parse_chat_completion(response.body, url)
        return message, usage

    async def _post_with_retries(self, body: Mapping[str, Any]) -> tuple[str, "HttpResponse"]:
        """Return address and response, after retries of transient failures."""
        from ramify.infer.client.http_client import (  # slow to load, and few environments need it
            HttpClient,
            RequestFailed,
        )

        data, connect_timeout = msgspec.json.encode(body), min(self.config.timeout, CONNECT_TIMEOUT)

        async def post() -> tuple[str, "HttpResponse"]:
            """Return address and response; raise ProviderError, which is retryable, for a transient failure.

            Each try asks for the address: a model of the run may have moved to another one.
            """
            base_url = self.config.resolve()[0].rstrip("/")
            url = f"{base_url}{COMPLETIONS_PATH}"
            async with HttpClient(base_url, connect_timeout=connect_timeout, max_connections=1) as http:
                http.headers |= self._headers
                try:
                    response = await http.request("POST", COMPLETIONS_PATH, data)
                except RequestFailed as error:
                    raise ProviderError(f"{url}: {error}") from error
            if response.status in RETRYABLE_STATUS_CODES:
                raise _status_error(url, response)
            return url, response

        return await retry(post, max_retries=self.config.retries, backoff=INITIAL_BACKOFF)


def _status_error(url: str, response: "HttpResponse") -> ProviderError:
    excerpt = response.body.decode("utf-8", "replace")[:EXCERPT_CHARS]
    return ProviderError(f"{url}: status {response.status}: {excerpt}")
