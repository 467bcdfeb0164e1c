"""The native server's dialect: it knows its versions and reports them token by token."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import ClientSampling, Completion, FinishReason
from ramify.client.engine_adapter import ModelCard, PauseMode, WeightUpdate
from ramify.client.generate_api import (
    GenerateRequest,
    GenerateResponse,
    build_usage,
    decode_json,
    get_only_choice,
    get_sampled_tokens,
    parse_prompt_logprobs,
)
from ramify.client.http_client import HttpConnectionPool, send_request
from ramify.errors import ProviderError, WeightsRefused
from ramify.model.version import PolicyVersion
from ramify.trace import VersionRun

GENERATE_PATH = "/inference/v1/generate"


class NativeAdapter:
    """One native server."""

    def __init__(self, url: str, http: HttpConnectionPool, version: PolicyVersion) -> None:
        self.url, self.version = url, version
        self._http = http

    async def describe(self) -> ModelCard:
        """What the server says about itself now."""
        return parse_model_card(await send_request(self._http, "GET", "/v1/models"), self.url)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Take one sample."""
        answer = decode_json(
            await send_request(self._http, "POST", GENERATE_PATH, request.to_dict()), GenerateResponse, self.url
        )
        choice = get_only_choice(answer, self.url)
        ids, logprobs = get_sampled_tokens(choice, self.url)
        runs = tuple(VersionRun(*run) for run in choice.policy_versions or ())
        if sum(run.count for run in runs) != len(ids):
            raise ProviderError(f"{self.url} answered {len(ids)} tokens whose versions do not add up: {runs}")
        finish = parse_finish_reason(choice.finish_reason, self.url)
        counts = build_usage(answer, request, len(ids))
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), finish, runs, counts, self.url)

    async def score(self, token_ids: Sequence[int], cache_salt: str | None = None) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1."""
        return await score_prompt(self._http, self.url, token_ids, cache_salt)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling."""
        await send_request(self._http, "POST", "/pause", mode=mode)

    async def resume(self) -> None:
        """Go on sampling."""
        await send_request(self._http, "POST", "/resume")

    async def update(self, update: WeightUpdate, *, paused: bool) -> float:
        """Apply a published version; the server itself swaps between two steps."""
        body = {"path": str(update.directory), "kv": update.kv_mode}
        told: dict[str, Any] = decode_json(
            await send_request(self._http, "POST", "/update_weights", body), dict, self.url
        )
        self.version = PolicyVersion(**told["version"])
        if self.version != update.version:
            said = f"{update.directory} holds {self.version}, not {update.version}; {self.url} serves it now"
            raise WeightsRefused(said)
        return float(told["seconds"])


async def score_prompt(
    http: HttpConnectionPool, url: str, token_ids: Sequence[int], cache_salt: str | None
) -> NDArray[np.float32]:
    """Prompt logprobs, asked for along with one token that is thrown away."""
    body = GenerateRequest(
        token_ids, ClientSampling(temperature=0.0, max_tokens=1, ignore_eos=True), salt=cache_salt
    ).to_dict()
    body["sampling_params"]["prompt_logprobs"] = 1
    return parse_prompt_logprobs(
        decode_json(await send_request(http, "POST", GENERATE_PATH, body), GenerateResponse, url), token_ids, url
    )


def parse_model_card(data: bytes, url: str) -> ModelCard:
    """The first model of `/v1/models`."""
    try:
        card = decode_json(data, dict, url)["data"][0]
        version = PolicyVersion(**card["version"]) if "version" in card else None
        return ModelCard(str(card["id"]), int(card["max_model_len"]), version)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProviderError(f"{url}/v1/models names no model with a max_model_len: {error!r}") from error


def parse_finish_reason(reason: str | None, url: str) -> FinishReason:
    """A finish reason that we know."""
    for known in get_args(FinishReason):
        if reason == known:
            return known
    raise ProviderError(f"{url} ended a sample with the finish reason {reason!r}, expected stop, length or abort")
