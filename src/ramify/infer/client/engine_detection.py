"""The first requests to a server: which engine is it, and can it be trained on?"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import EngineIncompatible, ProviderError, WeightsRefused
from ramify.infer.client.completion import ClientSampling
from ramify.infer.client.engine_adapter import EngineAdapter, WeightUpdate
from ramify.infer.client.generate_messages import (
    GENERATE_PATH,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    decode_json,
)
from ramify.infer.client.http_client import read_body, send_request
from ramify.infer.client.replica import Replica
from ramify.infer.client.vllm_adapter import VLLMAdapter
from ramify.trace import VersionSpan
from ramify.trace.version import UNDEFINED_POLICY, PolicyVersion

PROMPTS: tuple[tuple[int, ...], ...] = ((3, 5, 7), (11, 4, 9, 6), (8,), (5, 5, 12, 10))
TEMPERATURE = 2.0  # compared with temperature 1
TOP_K = 5
SLOPE_TOLERANCE = 0.1  # the slope is 1/T or 1; bfloat16 engines are a few percent off
MIN_SPREAD = 0.05  # nats between the compared tokens; a smaller spread may be rounding


async def check_logprobs(replica: Replica) -> None:
    """Raise EngineIncompatible unless the server computes logprobs after temperature.

    Training needs log softmax(logits / T) of the sampled token. Some servers return log softmax(logits), which is equal
    at T = 1 and silently different elsewhere. So the most likely tokens after a prompt are requested at two
    temperatures: in the difference of two logprobs the normaliser cancels, and the difference of the logits remains.
    """
    for prompt_ids in PROMPTS:
        plain = await _get_top_logprobs(replica, prompt_ids, 1.0)
        tempered = await _get_top_logprobs(replica, prompt_ids, TEMPERATURE)
        shared = sorted(set(plain) & set(tempered))
        plain_logprobs, tempered_logprobs = (
            np.array([logprobs[token_id] for token_id in shared]) for logprobs in (plain, tempered)
        )
        if len(shared) < 2 or np.ptp(plain_logprobs) < MIN_SPREAD:
            continue  # the tokens are almost equally likely: the slope would be noise
        slope = _fit_slope(plain_logprobs, tempered_logprobs)
        if abs(slope - 1 / TEMPERATURE) <= SLOPE_TOLERANCE:
            return
        if abs(slope - 1) <= SLOPE_TOLERANCE:
            reason = "its logprobs do not depend on the temperature; start vLLM with --logprobs-mode processed_logprobs"
        else:
            reason = f"between T = 1 and T = {TEMPERATURE:g} its logprobs scale by {slope:.2f}, expected 0.5"
        raise EngineIncompatible(f"{replica.url} cannot be trained on: {reason}")
    reason = f"after {len(PROMPTS)} prompts all tokens are equally likely"
    raise EngineIncompatible(f"{replica.url}: cannot tell whether its logprobs follow the temperature: {reason}")


def _fit_slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the slope of the least-squares line through (x, y)."""
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


async def _get_top_logprobs(replica: Replica, prompt_ids: tuple[int, ...], temperature: float) -> dict[int, float]:
    """Return the logprobs of the most likely tokens after the prompt, by token id."""
    sampling = ClientSampling(temperature=temperature, max_tokens=1, seed=0, ignore_eos=True)
    body = GenerateRequest(prompt_ids, sampling).to_dict()
    body["sampling_params"]["logprobs"] = TOP_K
    data = await send_request(replica.http, "POST", GENERATE_PATH, body)
    logprobs = decode_json(data, GenerateResponse, replica.url).choices[0].logprobs
    try:
        content = logprobs.content if logprobs is not None else None
        return {_parse_token_id(entry): float(entry["logprob"]) for entry in (content or [])[0].top_logprobs}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineIncompatible(f"{replica.url} returns no logprobs of the most likely tokens: {error!r}") from error


def _parse_token_id(entry: dict[str, object]) -> int:
    """Return the token id, which servers send as `token_id` or as the token `token_id:7`."""
    return int(str(entry["token_id"] if "token_id" in entry else entry["token"]).removeprefix("token_id:"))


# The adapter of the native engine, which knows its version and reports it with every token.


class NativeAdapter(EngineAdapter):
    """One native server."""

    async def update(self, update: WeightUpdate) -> float:
        """Load published weights; the server swaps them between two engine steps."""
        body = {"path": str(update.directory), "kv": update.kv_mode, "run": update.run}
        data = await send_request(self._http, "POST", "/update_weights", body)
        response = decode_json(data, dict[str, Any], self.url)
        self.version = PolicyVersion(**response["version"])
        if self.version != update.version:
            raise WeightsRefused(
                f"{update.directory} holds {self.version}, not {update.version}; {self.url} serves it now"
            )
        return float(response["seconds"])

    def _build_body(self, request: GenerateRequest) -> dict[str, Any]:
        body = super()._build_body(request)
        body["flat_logprobs"] = True
        return body

    def _build_logprobs_start(self, start: int) -> dict[str, int]:
        return {"logprobs_start": start}

    def _parse_version_spans(self, choice: GenerateChoice, num_tokens: int) -> tuple[VersionSpan, ...]:
        runs = tuple(VersionSpan(*run) for run in choice.policy_versions or ())
        if sum(run.count for run in runs) != num_tokens:
            raise ProviderError(f"{self.url} returned {num_tokens} tokens whose versions do not add up: {runs}")
        return runs


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
        native = NativeAdapter(replica.url, replica.http, reported_version)
        native.copies_from_trainer = bool(model.get("copies_from_trainer"))
        return native
    adapter = VLLMAdapter(
        replica.url,
        replica.http,
        version or PolicyVersion(name),
        model_root=model.get("root"),
    )
    await adapter.sync_label()
    return adapter


async def sync_weights(replica: Replica, adapter: EngineAdapter, update: WeightUpdate | None) -> None:
    """Bring a server to the weights that all servers of a client have, and check its logprobs.

    The native engine's logprobs are trusted. vLLM's are probed, because their meaning depends on `--logprobs-mode`.
    """
    if update is not None and adapter.version != update.version:
        await adapter.update(update)
    if adapter.version.policy == UNDEFINED_POLICY:
        raise ProviderError(f"a weight update of {replica.url} was interrupted; update or restart the server")
    if isinstance(adapter, VLLMAdapter):
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
