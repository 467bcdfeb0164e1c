"""Who answers in an eval: a server that runs already, or one that is started for it.

A server that gives token ids is sampled through the token client, so that the traces hold exactly what it saw. Any
other is asked as a chat endpoint: what it says is scored all the same, only its tokens are not known. Whatever is wrong
with the model or the address is found here, before the first rollout.
"""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ramify.errors import ConfigInvalid, LogprobMismatch, ModelNotFound, RamifyError, TokensRequired
from ramify.evals.config import EvalConfig
from ramify.evals.engine import EngineChild
from ramify.gateway import ChatPolicy, Policy, TokenPolicy
from ramify.infer.config import ExternalConfig, ServeConfig
from ramify.infer.connect import open_client
from ramify.model.resolve import resolve
from ramify.render import Renderer, load_renderer

PROBE = 10.0  # seconds for a server to say what it serves
TOKEN_OWNERS = ("ramify", "vllm")  # whose servers give token ids


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers, and the server behind it where it is ours."""

    policy: Policy
    engine: EngineChild | None = None

    @property
    def engine_url(self) -> str:
        """Where the server that was started for us answers."""
        assert self.engine is not None
        return self.engine.url


def check_server(config: EvalConfig) -> None:
    """Refuse a model that would have to be served here and is not there, or a port that is taken."""
    if not isinstance(config.inference, ExternalConfig):
        _directory(config)
        _check_port(config.server.host, config.server.port)


@contextlib.asynccontextmanager
async def answering(config: EvalConfig, folder: Path, say: Callable[[str], None]) -> AsyncIterator[Answering]:
    """The policy while it can be asked."""
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(config.inference, ExternalConfig):
            yield Answering(await _reached(config, config.inference.base_url, stack, say))
            return
        renderer = load_renderer(_directory(config), config.renderer)
        served = ServeConfig(
            model=config.model, renderer=config.renderer, inference=config.inference, server=config.server
        )
        say(f"starting {config.model.name} with the {config.inference.engine} engine")
        engine = await stack.enter_async_context(EngineChild(served, folder, deadline=config.start_deadline))
        card = (await _models(engine.url, ""))[0]
        yield Answering(await _tokens(config, [engine.url], renderer, card, stack), engine)


async def _reached(
    config: EvalConfig, urls: list[str], stack: contextlib.AsyncExitStack, say: Callable[[str], None]
) -> Policy:
    key = os.environ.get(config.api_key_env, "")
    cards = [await _models(url, key) for url in urls]
    why = _no_tokens(config, cards)
    if why is None:
        try:
            return await _tokens(config, [], load_renderer(_directory(config), config.renderer), cards[0][0], stack)
        except (TokensRequired, LogprobMismatch) as error:
            why = error.message
        except RamifyError as error:
            raise ConfigInvalid(f"inference.base_url: {error.message}") from error
    if config.client == "tokens":
        raise ConfigInvalid(f"client: 'tokens' is not possible: {why}")
    if len(urls) > 1:
        raise ConfigInvalid(f"inference.base_url: several servers need token ids ({why}); give one address")
    say(f"asking {urls[0]} as a chat endpoint, without token ids: {why}")
    listed = [str(card.get("id")) for card in cards[0]]
    if listed and config.model.name not in listed:
        say(f"{urls[0]} lists {', '.join(listed[:5])}, not {config.model.name}")
    policy = ChatPolicy(f"{urls[0]}/v1", config.model.name, key)
    stack.push_async_callback(policy.close)
    return policy


def _no_tokens(config: EvalConfig, cards: list[list[dict[str, Any]]]) -> str | None:
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


async def _tokens(
    config: EvalConfig, started: list[str], renderer: Renderer, card: dict[str, Any], stack: contextlib.AsyncExitStack
) -> TokenPolicy:
    client = await stack.enter_async_context(open_client(config.inference, started))
    length = card.get("max_model_len")
    return TokenPolicy(client, renderer, config.model.name, max_model_len=length if isinstance(length, int) else None)


async def _models(url: str, key: str) -> list[dict[str, Any]]:
    """What the server says it serves; nothing where it does not say."""
    headers, secure = {"Authorization": f"Bearer {key}"} if key else {}, url.startswith("https:")
    try:
        async with httpx.AsyncClient(timeout=PROBE, trust_env=False, headers=headers, verify=secure) as http:
            answer = await http.get(f"{url}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = str(error) or type(error).__name__
        raise ConfigInvalid(f"inference.base_url: {url} cannot be reached: {said}") from error
    if answer.status_code in (401, 403):
        raise ConfigInvalid(
            f"inference.base_url: {url} answered {answer.status_code}; set api_key_env to the key's name"
        )
    try:
        listed = answer.json()["data"]
        return [entry for entry in listed if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _check_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        said = f"server.port: {host}:{port} cannot be listened on: {error.strerror}; 0 takes a free one"
        raise ConfigInvalid(said) from error


def _directory(config: EvalConfig) -> Path:
    try:
        return resolve(config.model.name)
    except ModelNotFound as error:
        raise ConfigInvalid(f"model.name: {error.message}") from error
