"""vLLM's dialect: a stock server in development mode, driven through its own endpoints.

vLLM labels its weights with a text of ours and reports for each sample which tokens came from which label. Why no token
gets a wrong one, although tokens are on their way while the label changes:
1. The engine's own thread writes the label onto the tokens of a step when it takes them from the model, and the label
   travels with them. How far behind the server's front or this client is does not matter: nothing is counted here.
2. The same thread changes the label, and only after a pause. A pause is answered when every step that was begun, those
   scheduled ahead included, has been taken in. So no token of the old weights is left that could meet a later label.
3. From before the reload until after it the label is one that names no version. Should anybody resume the server in
   between, or the reload be given up half-way, then its tokens are refused (`Unnamed`) and not given a version.
So it has to be one client that gives a server its weights; two would label each other's.

What vLLM does not have is a cache keyed by version. With `kv = "recompute"` every block is dropped and the running
requests start over. With `kv = "keep"` blocks in use cannot be dropped, so new requests are kept away from them
instead: each one carries the version in its `cache_salt`.

A directory is verified here first, down to the shapes: vLLM does not survive a reload that fails.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import Completion
from ramify.client.engine_adapter import ModelCard, PauseMode, UnknownWeights, WeightUpdate
from ramify.client.generate_api import (
    GenerateRequest,
    GenerateResponse,
    WeightVersionSpan,
    build_usage,
    decode_json,
    get_only_choice,
    get_sampled_tokens,
)
from ramify.client.http_client import ConnectFailed, HttpConnectionPool, ResponseLost, ServerBusy, send_request
from ramify.client.native_adapter import GENERATE_PATH, parse_finish_reason, parse_model_card, score_prompt
from ramify.errors import DeadlineExceeded, ProviderError, RamifyError, RequestInvalid, WeightsRefused
from ramify.model.manifest import verify_weights
from ramify.model.version import PolicyVersion
from ramify.trace import VersionRun

RESET_TIMEOUT = 10.0  # seconds for requests to let go of their blocks
RESET_POLL_INTERVAL = 0.05
UNDEFINED_LABEL = "undefined"  # the label of weights that were left half-way


class VLLMAdapter:
    """One vLLM server."""

    def __init__(self, url: str, http: HttpConnectionPool, version: PolicyVersion, *, model_root: str | None) -> None:
        self.url, self.version = url, version
        self._http = http
        self._model_dir = (
            Path(model_root) if model_root and Path(model_root).is_dir() else None
        )  # the model it was started with, if we see it
        self._vocab_size = _read_vocab_size(self._model_dir)
        self._is_dev_mode = True

    async def describe(self) -> ModelCard:
        """What the server says about itself now; the version it is labelled with, if the label is one of ours."""
        card = parse_model_card(await send_request(self._http, "GET", "/v1/models"), self.url)
        return ModelCard(card.model, card.max_model_len, PolicyVersion.parse(await self._get_label()))

    async def sync_label(self) -> None:
        """Take over the label of the server's weights, or give them one."""
        try:
            label = await self._get_label()
        except ProviderError:
            self._is_dev_mode = False  # not in development mode: it can be sampled from, not updated
            return
        if label == UNDEFINED_LABEL:
            self.version = PolicyVersion(UNDEFINED_LABEL)
        elif (version := PolicyVersion.parse(label)) is not None:
            self.version = version
        else:
            await self.set_label(str(self.version))

    async def set_label(self, label: str) -> None:
        """Name the weights that the server has."""
        await send_request(self._http, "POST", "/update_weight_version", {"new_version": label})

    async def _get_label(self) -> str:
        return str(
            decode_json(await send_request(self._http, "GET", "/weight_info"), dict, self.url).get("weight_version")
        )

    def versioned_cache_salt(self, cache_salt: str | None) -> str:
        """The cache salt of a request: what other weights have computed is not for it.

        A digest, because vLLM takes 128 characters at most and not all of them.
        """
        return hashlib.sha256(f"{self.version}|{cache_salt or ''}".encode()).hexdigest()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Take one sample."""
        self._check_token_ids(request.prompt)
        body = {**request.to_dict(), "cache_salt": self.versioned_cache_salt(request.salt)}
        answer = decode_json(await send_request(self._http, "POST", GENERATE_PATH, body), GenerateResponse, self.url)
        choice = get_only_choice(answer, self.url)
        ids, logprobs = get_sampled_tokens(choice, self.url)
        runs = self._version_runs(choice.weight_versions or [], len(ids))
        finish = parse_finish_reason(choice.finish_reason, self.url)
        counts = build_usage(answer, request, len(ids))
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), finish, runs, counts, self.url)

    async def score(self, token_ids: Sequence[int], cache_salt: str | None = None) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1."""
        self._check_token_ids(token_ids)
        return await score_prompt(self._http, self.url, token_ids, self.versioned_cache_salt(cache_salt))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; the caches stay as they are."""
        await send_request(self._http, "POST", "/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        """Go on sampling."""
        await send_request(self._http, "POST", "/resume")

    async def update(self, update: WeightUpdate, *, paused: bool) -> float:
        """Verify the directory, then pause, reload by path, drop the cache, label, resume.

        If that fails half-way the weights are no version at all: the server is left paused and labelled so, and its
        requests end with finish `abort`. If it is cancelled, they stay where they are.
        """
        if not self._is_dev_mode:
            raise WeightsRefused(f"{self.url} takes no weights: vLLM has to be started with VLLM_SERVER_DEV_MODE=1")
        manifest = await asyncio.to_thread(verify_weights, update.directory, self._model_dir)
        if manifest.version != update.version:
            raise WeightsRefused(f"{update.directory} holds {manifest.version}, not {update.version}")
        start = time.perf_counter()
        await self.pause("keep")
        try:
            await self.set_label(UNDEFINED_LABEL)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.directory)}}
            await send_request(self._http, "POST", "/collective_rpc", reload)
            if update.kv_mode == "recompute":
                await self._reset_prefix_cache()
            await self.set_label(str(update.version))
        except BaseException as error:
            self.version = PolicyVersion(UNDEFINED_LABEL)
            if isinstance(error, Exception):
                with contextlib.suppress(
                    RamifyError, ConnectFailed, ResponseLost, ServerBusy
                ):  # the first failure is the one to tell
                    await self.pause("abort")
            raise
        self.version = update.version
        if not paused:
            await self.resume()
        return time.perf_counter() - start

    async def _reset_prefix_cache(self) -> None:
        """Empty the cache. The server answers 200 and `success: false` while a request holds on to a block."""
        deadline = time.monotonic() + RESET_TIMEOUT
        while True:
            data = await send_request(self._http, "POST", "/reset_prefix_cache", reset_running_requests="true")
            if decode_json(data, dict, self.url).get("success"):
                return
            if time.monotonic() > deadline:
                said = f"its prefix cache could not be reset within {RESET_TIMEOUT:g} s, requests hold blocks of it"
                raise DeadlineExceeded(f"{self.url} has new weights, but {said}")
            await asyncio.sleep(RESET_POLL_INTERVAL)

    def _version_runs(self, spans: list[WeightVersionSpan], num_tokens: int) -> tuple[VersionRun, ...]:
        ends = [0, *(span.end for span in spans)]
        if ends[-1] != num_tokens or any(span.start != end or span.end <= end for span, end in zip(spans, ends)):
            raise ProviderError(f"{self.url} answered {num_tokens} tokens whose versions do not add up: {spans}")
        return tuple(VersionRun(*self._version_of_label(span.version), span.end - span.start) for span in spans)

    def _version_of_label(self, label: str) -> PolicyVersion:
        """The version a label stands for. Outside development mode nobody can change weights or label."""
        version = PolicyVersion.parse(label)
        if version is None and self._is_dev_mode:
            raise UnknownWeights(f"{self.url} sampled from weights labelled {label!r}, which is no version")
        return version or self.version

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse what would stop the whole server: without a tokenizer, vLLM looks every id up unchecked."""
        if (
            self._vocab_size is not None
            and len(token_ids)
            and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size
        ):
            found = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise RequestInvalid(f"the prompt holds token id {found}; the vocabulary is 0 to {self._vocab_size - 1}")


def _read_vocab_size(model_dir: Path | None) -> int | None:
    try:
        return None if model_dir is None else int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None
