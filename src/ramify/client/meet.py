"""The first words with a server: which engine is it, and can it be trained on?"""

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
    data = await exchange(replica.http, "GET", "/v1/models")
    card = read_card(data, replica.url)
    if card.version is not None:
        return Native(replica.url, replica.http, card.version)
    entry = decode(data, dict, replica.url)["data"][0]
    if entry.get("owned_by") != "vllm":
        said = f"its models are owned by {entry.get('owned_by')!r}, expected 'ramify' or 'vllm'"
        raise TokensRequired(f"{replica.url} is no server that gives token ids and logprobs: {said}")
    spoken = VLLM(replica.url, replica.http, version or Version(card.model), root=entry.get("root"))
    await spoken.adopt()
    return spoken


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
