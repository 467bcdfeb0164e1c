"""Whom the agents of a worker ask: the token client where the servers give tokens, a chat endpoint otherwise."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from ramify.client.http import Busy, Lost, Unsent, exchange
from ramify.client.http import open_client as open_http
from ramify.envserver.config import EnvServerConfig
from ramify.errors import (
    ConfigInvalid,
    LogprobMismatch,
    ModelNotFound,
    ProviderError,
    RequestInvalid,
    TokensRequired,
)
from ramify.gateway import ChatPolicy, Policy, TokenPolicy
from ramify.infer.connect import open_client
from ramify.model.resolve import resolve
from ramify.render import load_renderer

PROBE = 10.0  # seconds for a server to say what it serves
TOKEN_OWNERS = ("ramify", "vllm")  # whose servers give token ids


async def open_policy(config: EnvServerConfig, stack: contextlib.AsyncExitStack) -> Policy:
    """The policy, open until the stack is closed."""
    urls, key = config.inference.base_url, os.environ.get(config.api_key_env, "")
    cards = [await _models(url, key) for url in urls]
    why = _no_tokens(config, cards)
    if why is None:
        try:
            client = await stack.enter_async_context(open_client(config.inference))
            length = cards[0][0].get("max_model_len")
            renderer = load_renderer(resolve(config.model.name), config.renderer)
            longest = length if isinstance(length, int) else None
            return TokenPolicy(client, renderer, config.model.name, max_model_len=longest)
        except (TokensRequired, LogprobMismatch) as error:
            why = error.message
    if config.client == "tokens":
        raise ConfigInvalid(f"client: 'tokens' is not possible: {why}")
    if len(urls) > 1:
        raise ConfigInvalid(f"inference.base_url: several servers need token ids ({why}); give one address")
    policy = ChatPolicy(f"{urls[0]}/v1", config.model.name, key)
    stack.push_async_callback(policy.close)
    return policy


def _no_tokens(config: EnvServerConfig, cards: list[list[dict[str, Any]]]) -> str | None:
    """Why the servers cannot be asked for tokens; None if they can."""
    if config.client == "chat":
        return "client = 'chat'"
    owners = {str(card[0].get("owned_by")) if card else "nobody" for card in cards}
    if not owners <= set(TOKEN_OWNERS):
        return f"its models are owned by {', '.join(sorted(owners))}, not by {' or '.join(TOKEN_OWNERS)}"
    served = {str(card[0].get("id")) for card in cards}
    if any(Path(name).name != Path(config.model.name).name for name in served):
        raise ConfigInvalid(f"model.name: the server has {', '.join(sorted(served))}, not {config.model.name}")
    try:
        resolve(config.model.name)
    except ModelNotFound as error:
        return error.message
    return None


async def _models(url: str, key: str) -> list[dict[str, Any]]:
    """What the server says it serves; nothing where it does not say. One that is not up yet may come."""
    http = open_http(url, connect=PROBE, connections=1)
    if key:
        http.headers["Authorization"] = f"Bearer {key}"
    try:
        async with asyncio.timeout(PROBE):
            listed = msgspec.json.decode(await exchange(http, "GET", "/v1/models"))["data"]
            return [entry for entry in listed if isinstance(entry, dict)]
    except (Unsent, Lost, Busy, TimeoutError) as error:
        raise ProviderError(f"{url} cannot be reached: {error or 'it does not answer'}") from error
    except ProviderError as error:
        if any(f"answered {status}" in error.message for status in (401, 403)):
            raise ConfigInvalid(f"inference.base_url: {error.message}; set api_key_env to the key's name") from error
        return []  # an endpoint without a list
    except (msgspec.DecodeError, RequestInvalid, KeyError, TypeError):
        return []
    finally:
        await http.aclose()
