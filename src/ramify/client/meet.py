"""The first words with a server: which engine is it, and can it be trained on?"""

from typing import Any

from ramify.client.answers import decode
from ramify.client.control import Dialect, Update
from ramify.client.http import read_body
from ramify.client.native import Native, read_card
from ramify.client.pool import Replica
from ramify.client.probe import probe
from ramify.client.vllm import UNDEFINED, VLLM
from ramify.errors import ProviderError, TokensRequired
from ramify.model.version import Version

MODELS = "/v1/models"


async def meet(replica: Replica, version: Version | None) -> Dialect:
    """The server's dialect. `version` names the weights of an engine that does not know any."""
    data = await _models(replica)
    entry = _first_model(data, replica.url)
    owner = entry.get("owned_by")
    if "version" not in entry and owner != "vllm":
        raise _tokens_required(replica.url, f"its models are owned by {owner!r}, expected 'ramify' or 'vllm'")
    card = read_card(data, replica.url)
    if card.version is not None:
        return Native(replica.url, replica.http, card.version)
    spoken = VLLM(replica.url, replica.http, version or Version(card.model), root=entry.get("root"))
    await spoken.adopt()
    return spoken


async def _models(replica: Replica) -> bytes:
    """Return the body of `/v1/models`. A server that answers 404 is no engine, and is not asked again."""
    answer = await replica.http.ask("GET", MODELS)
    if answer.status == 404:
        raise _tokens_required(replica.url, f"it has no list of models at {MODELS}")
    return read_body(replica.http, MODELS, answer)


def _first_model(data: bytes, url: str) -> dict[str, Any]:
    """Return the first entry of the list of models; only its type is checked."""
    models = decode(data, dict, url).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise _tokens_required(url, f"it lists no model at {MODELS}")
    return models[0]


def _tokens_required(url: str, reason: str) -> TokensRequired:
    return TokensRequired(f"{url} is no server that gives token ids and logprobs: {reason}")


async def catch_up(replica: Replica, spoken: Dialect, update: Update | None) -> None:
    """Bring a server to the weights that all servers of a client have.

    The native server's logprobs are taken at its word; vLLM's are probed, since what they mean is a flag there.
    """
    if update is not None and spoken.version != update.version:
        await spoken.update(update, paused=False)
    if isinstance(spoken, VLLM):
        if spoken.version.policy == UNDEFINED:
            raise ProviderError(f"{replica.url} was left half-way through a weight update; update or restart it")
        await probe(replica)
