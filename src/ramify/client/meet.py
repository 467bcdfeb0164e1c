"""The first words with a server: which engine is it, and can it be trained on?"""

from typing import Any

from ramify.client.answers import decode
from ramify.client.control import Dialect, Update
from ramify.client.http import exchange
from ramify.client.native import Native, read_card
from ramify.client.pool import Replica
from ramify.client.probe import probe
from ramify.client.vllm import UNDEFINED, VLLM
from ramify.errors import ProviderError, TokensRequired
from ramify.model.version import Version


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
    """The answer of `/v1/models`; an endpoint without that list will not get one by being asked again."""
    try:
        return await exchange(replica.http, "GET", "/v1/models")
    except ProviderError as error:
        if "answered 404" in error.message:
            raise _tokens_required(replica.url, "it has no list of models at /v1/models") from error
        raise


def _first_model(data: bytes, url: str) -> dict[str, Any]:
    """The first entry of the list of models, whatever it says."""
    listed = decode(data, dict, url).get("data")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        raise _tokens_required(url, "it lists no model at /v1/models")
    return listed[0]


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
