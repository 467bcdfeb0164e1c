"""Connect a policy to servers: through the token client if they return token ids, else as a chat endpoint.

With token ids, traces hold exactly what the server saw. Replies of a chat endpoint are scored too, but their tokens are
not known.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.core.errors import ConfigInvalid, EngineIncompatible, ModelNotFound, ProviderError, RequestInvalid
from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.client.engine_detection import MODELS_PATH
from ramify.infer.client.http_client import (
    ConnectFailed,
    HttpClient,
    ResponseLost,
    ServerBusy,
    error_from_response,
    read_body,
)
from ramify.infer.gateway.policy import ChatPolicy, Policy, TokenPolicy
from ramify.model.render import load_renderer
from ramify.model.render.config import RendererConfig
from ramify.model.resolve import read_vocab_size, resolve_model_path

PROBE_TIMEOUT = 10.0  # seconds for a server to list its models
TOKEN_API_OWNERS = ("ramify", "vllm")  # the `owned_by` of servers that return token ids

ClientMode = Literal["auto", "tokens", "chat"]


async def connect_policy(
    urls: Sequence[str],
    model: str,
    renderer: RendererConfig,
    stack: contextlib.AsyncExitStack,
    *,
    client_mode: ClientMode = "auto",
    api_key: str = "",
    served_model: str | None = None,
    retries: int = 5,
    log: Callable[[str], None] = lambda _: None,
) -> Policy:
    """Connect to these servers and return their policy, which stays open until `stack` is closed.

    `served_model` is the name of the model on the servers, if it is another one with the tokenizer of `model`; ""
    stands for any name. A model call is sent again up to `retries` times after a transient failure.
    Raises ProviderError if no server responds.
    """
    cards = await _list_models_of_all(urls, api_key)
    reason = _why_no_token_ids(client_mode, model, model if served_model is None else served_model, cards)
    if reason is None:
        try:
            client = await stack.enter_async_context(InferenceClient(urls, ClientConfig(retries=retries)))
            path, max_model_len = resolve_model_path(model), cards[0][0].get("max_model_len")
            return TokenPolicy(
                client,
                load_renderer(path, renderer),
                served_model or model,
                max_model_len=max_model_len if isinstance(max_model_len, int) else None,
                vocab_size=read_vocab_size(path),
            )
        except EngineIncompatible as error:
            reason = error.message
    if client_mode == "tokens":
        raise ConfigInvalid(f"client: 'tokens' is not possible: {reason}")
    if len(urls) > 1:
        raise ConfigInvalid(f"several servers require token ids ({reason}); use one address", key="inference.base_url")
    log(f"using {urls[0]} as a chat endpoint, without token ids: {reason}")
    model_ids = [str(card.get("id")) for card in cards[0]]
    if model_ids and model not in model_ids:
        log(f"{urls[0]} lists {', '.join(model_ids[:5])}, not {model}")
    policy = ChatPolicy(f"{urls[0]}/v1", model, api_key, retries=retries)
    stack.push_async_callback(policy.close)
    return policy


def _why_no_token_ids(
    client_mode: ClientMode, model: str, served_model: str, cards: list[list[dict[str, Any]]]
) -> str | None:
    """Return why the servers cannot be sampled by token ids; None if they can."""
    if client_mode == "chat":
        return "client = 'chat'"
    owners = {str(card[0].get("owned_by")) if card else "nobody" for card in cards}
    if not owners <= set(TOKEN_API_OWNERS):
        return f"its models are owned by {', '.join(sorted(owners))}, not by {' or '.join(TOKEN_API_OWNERS)}"
    served = {str(card[0].get("id")) for card in cards}
    if served_model and any(Path(name).name != Path(served_model).name for name in served):
        raise ConfigInvalid(f"the server has {', '.join(sorted(served))}, not {served_model}", key="model.name")
    try:
        resolve_model_path(model)
    except ModelNotFound as error:
        return error.message
    return None


async def _list_models_of_all(urls: Sequence[str], api_key: str) -> list[list[dict[str, Any]]]:
    """Return the models of each server that responds; raise the failure of the first if none does."""
    results = await asyncio.gather(*(_list_models(url, api_key) for url in urls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ProviderError):
            raise result
    cards = [result for result in results if not isinstance(result, BaseException)]
    if not cards:
        raise next(result for result in results if isinstance(result, BaseException))
    return cards


async def _list_models(url: str, api_key: str) -> list[dict[str, Any]]:
    """Return the models that a server lists; an empty list if it has no model list.

    Raises ProviderError, which is retryable, if the server cannot be reached.
    """
    try:
        async with (
            asyncio.timeout(PROBE_TIMEOUT),
            HttpClient(url, connect_timeout=PROBE_TIMEOUT, max_connections=1) as http,
        ):
            if api_key:
                http.headers["Authorization"] = f"Bearer {api_key}"
            response = await http.request("GET", MODELS_PATH)
            if response.status in (401, 403):
                reason = error_from_response(http, MODELS_PATH, response)
                raise ConfigInvalid(f"{reason}; set api_key_env to the key's name", key="inference.base_url")
            cards = msgspec.json.decode(read_body(http, MODELS_PATH, response))["data"]
            return [card for card in cards if isinstance(card, dict)]
    except ConnectFailed as error:  # its message has the server and the reason
        raise ProviderError(str(error)) from error
    except (ResponseLost, ServerBusy, TimeoutError) as error:
        raise ProviderError(f"{url} cannot be reached: {error or 'it does not answer'}") from error
    except (msgspec.DecodeError, ProviderError, RequestInvalid, KeyError, TypeError):
        return []  # an endpoint without a model list
