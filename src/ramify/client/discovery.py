"""The first words with a server: which engine is it, and can it be trained on?"""

from typing import Any

from ramify.client.engine_adapter import EngineAdapter, WeightUpdate
from ramify.client.generate_api import decode_json
from ramify.client.http_client import read_body
from ramify.client.logprob_probe import check_logprobs
from ramify.client.native_adapter import NativeAdapter, parse_model_card
from ramify.client.replica_pool import Replica
from ramify.client.vllm_adapter import UNDEFINED_LABEL, VLLMAdapter
from ramify.errors import ProviderError, TokensRequired
from ramify.model.version import PolicyVersion

MODELS_PATH = "/v1/models"


async def detect_engine(replica: Replica, version: PolicyVersion | None) -> EngineAdapter:
    """The server's dialect. `version` names the weights of an engine that does not know any."""
    data = await _get_models(replica)
    entry = _parse_first_model(data, replica.url)
    owner = entry.get("owned_by")
    if "version" not in entry and owner != "vllm":
        raise _tokens_required_error(replica.url, f"its models are owned by {owner!r}, expected 'ramify' or 'vllm'")
    card = parse_model_card(data, replica.url)
    if card.version is not None:
        return NativeAdapter(replica.url, replica.http, card.version)
    spoken = VLLMAdapter(replica.url, replica.http, version or PolicyVersion(card.model), model_root=entry.get("root"))
    await spoken.sync_label()
    return spoken


async def _get_models(replica: Replica) -> bytes:
    """Return the body of `/v1/models`. A server that answers 404 is no engine, and is not asked again."""
    answer = await replica.http.request("GET", MODELS_PATH)
    if answer.status == 404:
        raise _tokens_required_error(replica.url, f"it has no list of models at {MODELS_PATH}")
    return read_body(replica.http, MODELS_PATH, answer)


def _parse_first_model(data: bytes, url: str) -> dict[str, Any]:
    """Return the first entry of the list of models; only its type is checked."""
    models = decode_json(data, dict, url).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise _tokens_required_error(url, f"it lists no model at {MODELS_PATH}")
    return models[0]


def _tokens_required_error(url: str, reason: str) -> TokensRequired:
    return TokensRequired(f"{url} is no server that gives token ids and logprobs: {reason}")


async def sync_weights(replica: Replica, adapter: EngineAdapter, update: WeightUpdate | None) -> None:
    """Bring a server to the weights that all servers of a client have.

    The native server's logprobs are taken at its word; vLLM's are probed, since what they mean is a flag there.
    """
    if update is not None and adapter.version != update.version:
        await adapter.update(update, paused=False)
    if isinstance(adapter, VLLMAdapter):
        if adapter.version.policy == UNDEFINED_LABEL:
            raise ProviderError(f"{replica.url} was left half-way through a weight update; update or restart it")
        await check_logprobs(replica)
