"""The first requests to a server: which engine is it, and can it be trained on?"""

from typing import Any

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import EngineIncompatible, ProviderError
from ramify.infer.client.engine_adapter import EngineAdapter, WeightUpdate
from ramify.infer.client.generate_api import decode_json
from ramify.infer.client.http_client import read_body
from ramify.infer.client.logprob_probe import check_logprobs
from ramify.infer.client.native_adapter import NativeAdapter
from ramify.infer.client.replica_pool import Replica
from ramify.infer.client.vllm_adapter import UNDEFINED_LABEL, VLLMAdapter
from ramify.trace.version import PolicyVersion

MODELS_PATH = "/v1/models"


async def detect_engine(replica: Replica, version: PolicyVersion | None) -> EngineAdapter:
    """Return an adapter for the server. `version` names the weights of an engine that reports no version.

    Raises EngineIncompatible if the server is neither the native engine nor vLLM.
    """
    model = _parse_first_model(await _get_models(replica), replica.url)
    owner = model.get("owned_by")
    if "version" not in model and owner != "vllm":
        raise _tokens_required_error(replica.url, f"its models are owned by {owner!r}, expected 'ramify' or 'vllm'")
    name, reported_version = _parse_model(model, replica.url)
    if reported_version is not None:
        return NativeAdapter(replica.url, replica.http, reported_version)
    adapter = VLLMAdapter(
        replica.url,
        replica.http,
        version or PolicyVersion(name),
        model_root=model.get("root"),
        verification_caller=replica.verification_caller,
    )
    await adapter.sync_label()
    return adapter


async def sync_weights(replica: Replica, adapter: EngineAdapter, update: WeightUpdate | None) -> None:
    """Bring a server to the weights that all servers of a client have, and check its logprobs.

    The native engine's logprobs are trusted. vLLM's are probed, because their meaning depends on `--logprobs-mode`.
    """
    if update is not None and adapter.version != update.version:
        await adapter.update(update, paused=False)
    if isinstance(adapter, VLLMAdapter):
        if adapter.version.policy == UNDEFINED_LABEL:
            raise ProviderError(f"a weight update of {replica.url} was interrupted; update or restart the server")
        await check_logprobs(replica)


async def _get_models(replica: Replica) -> bytes:
    """Return the body of `/v1/models`. A server without it is not an engine, and is not asked again."""
    response = await replica.http.request("GET", MODELS_PATH)
    if response.status == 404:
        raise _tokens_required_error(replica.url, f"it has no list of models at {MODELS_PATH}")
    return read_body(replica.http, MODELS_PATH, response)


def _parse_first_model(data: bytes, url: str) -> dict[str, Any]:
    models = decode_json(data, dict[str, Any], url).get("data")
    if not is_list(models) or not models or not is_dict(models[0]):
        raise _tokens_required_error(url, f"it lists no model at {MODELS_PATH}")
    return models[0]


def _parse_model(model: dict[str, Any], url: str) -> tuple[str, PolicyVersion | None]:
    """Return the name and, if the engine reports one, the version. Every engine also reports a max_model_len."""
    try:
        int(model["max_model_len"])
        return str(model["id"]), PolicyVersion(**model["version"]) if "version" in model else None
    except (KeyError, TypeError, ValueError) as error:
        raise ProviderError(f"{url}{MODELS_PATH} names no model with a max_model_len: {error!r}") from error


def _tokens_required_error(url: str, reason: str) -> EngineIncompatible:
    return EngineIncompatible(f"{url} does not return token ids and logprobs: {reason}")
