"""From addresses to a policy: the token client where the servers give tokens, a chat endpoint otherwise.

A server that gives token ids is sampled through the token client, so that the traces hold exactly what it saw. Any
other is asked as a chat endpoint: what it says is scored all the same, only its tokens are not known.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.client import InferenceClient
from ramify.client.http_client import ConnectFailed, ResponseLost, ServerBusy, open_client, send_request
from ramify.errors import ConfigInvalid, LogprobMismatch, ModelNotFound, ProviderError, RequestInvalid, TokensRequired
from ramify.gateway.policy import ChatPolicy, Policy, TokenPolicy
from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from ramify.render.config import RendererConfig

PROBE_TIMEOUT = 10.0  # seconds for a server to say what it serves
TOKEN_API_OWNERS = ("ramify", "vllm")  # whose servers give token ids

ClientMode = Literal["auto", "tokens", "chat"]


async def connect_policy(
    urls: Sequence[str],
    model: str,
    renderer: RendererConfig,
    stack: contextlib.AsyncExitStack,
    *,
    client_mode: ClientMode = "auto",
    api_key: str = "",
    log: Callable[[str], None] = lambda _: None,
) -> Policy:
    """The policy behind these servers, open until the stack is closed. Raises ProviderError where nobody answers."""
    cards = [await _list_models(url, api_key) for url in urls]
    why = _why_no_token_ids(client_mode, model, cards)
    if why is None:
        try:
            client = await stack.enter_async_context(InferenceClient(urls))
            length = cards[0][0].get("max_model_len")
            longest = length if isinstance(length, int) else None
            path = resolve_model_path(model)
            vocabulary = _read_vocab_size(path)
            return TokenPolicy(
                client, load_renderer(path, renderer), model, max_model_len=longest, vocab_size=vocabulary
            )
        except (TokensRequired, LogprobMismatch) as error:
            why = error.message
    if client_mode == "tokens":
        raise ConfigInvalid(f"client: 'tokens' is not possible: {why}")
    if len(urls) > 1:
        raise ConfigInvalid(f"inference.base_url: several servers need token ids ({why}); give one address")
    log(f"asking {urls[0]} as a chat endpoint, without token ids: {why}")
    listed = [str(card.get("id")) for card in cards[0]]
    if listed and model not in listed:
        log(f"{urls[0]} lists {', '.join(listed[:5])}, not {model}")
    policy = ChatPolicy(f"{urls[0]}/v1", model, api_key)
    stack.push_async_callback(policy.close)
    return policy


def _read_vocab_size(path: Path) -> int | None:
    """Return the size of a model's vocabulary; None if its config does not say."""
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes())
        return int(config["vocab_size"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


def _why_no_token_ids(client_mode: ClientMode, model: str, cards: list[list[dict[str, Any]]]) -> str | None:
    """Why the servers cannot be asked for tokens; None if they can."""
    if client_mode == "chat":
        return "client = 'chat'"
    owners = {str(card[0].get("owned_by")) if card else "nobody" for card in cards}
    if not owners <= set(TOKEN_API_OWNERS):
        return f"its models are owned by {', '.join(sorted(owners))}, not by {' or '.join(TOKEN_API_OWNERS)}"
    served = {str(card[0].get("id")) for card in cards}
    if any(Path(name).name != Path(model).name for name in served):
        raise ConfigInvalid(f"model.name: the server has {', '.join(sorted(served))}, not {model}")
    try:
        resolve_model_path(model)
    except ModelNotFound as error:
        return error.message
    return None


async def _list_models(url: str, api_key: str) -> list[dict[str, Any]]:
    """What the server says it serves; nothing where it does not say. One that is not up yet may come."""
    http = open_client(url, connect_timeout=PROBE_TIMEOUT, max_connections=1)
    if api_key:
        http.headers["Authorization"] = f"Bearer {api_key}"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            listed = msgspec.json.decode(await send_request(http, "GET", "/v1/models"))["data"]
            return [entry for entry in listed if isinstance(entry, dict)]
    except ConnectFailed as error:  # its message names the server and says why
        raise ProviderError(str(error)) from error
    except (ResponseLost, ServerBusy, TimeoutError) as error:
        raise ProviderError(f"{url} cannot be reached: {error or 'it does not answer'}") from error
    except ProviderError as error:
        if any(f"answered {status}" in error.message for status in (401, 403)):
            raise ConfigInvalid(f"inference.base_url: {error.message}; set api_key_env to the key's name") from error
        return []  # an endpoint without a list
    except (msgspec.DecodeError, RequestInvalid, KeyError, TypeError):
        return []
    finally:
        await http.aclose()
