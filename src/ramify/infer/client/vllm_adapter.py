"""The adapter of vLLM: an unmodified server in development mode, driven through its own endpoints.

vLLM labels its weights with a text that the client sets, and reports for each sample which tokens came from which
label. Every token gets the right label, although tokens are in flight while the label changes:
1. The engine's thread attaches the label to the tokens of a step when the model returns them, and the label travels
   with them. A delay in the server's front end or in this client does not matter.
2. The same thread changes the label, and only after a pause. A pause is answered when every step that was started or
   scheduled ahead has finished, so no token of the old weights can get a later label.
3. From before the reload until after it, the label names no version. If the server is resumed in between, or the reload
   is interrupted, its tokens are rejected (`UnknownWeights`).
So only one client may update the weights of a server.

vLLM's cache is not keyed by version. With `kv_mode = "recompute"` all blocks are dropped and running requests start
over. With `kv_mode = "keep"` blocks in use cannot be dropped, so each new request carries the version in its
`cache_salt` and never matches them.

A directory is verified before it is loaded, down to the shapes, because vLLM does not survive a reload that fails.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ramify.core.async_calls import call_storage
from ramify.core.errors import (
    DeadlineExceeded,
    ModelUnsupported,
    ProviderError,
    RamifyError,
    RequestInvalid,
    WeightsRefused,
)
from ramify.infer.client.engine_adapter import EngineAdapter, UnknownWeights, WeightUpdate
from ramify.infer.client.generate_messages import GenerateChoice, GenerateRequest, decode_json
from ramify.infer.client.http_client import HttpClient, RequestFailed, send_request
from ramify.model.resolve import read_vocab_size
from ramify.model.weights_manifest import verify_weights
from ramify.trace import VersionSpan
from ramify.trace.version import UNDEFINED_POLICY, PolicyVersion

RESET_TIMEOUT = 10.0  # seconds for requests to free their blocks
RESET_POLL_INTERVAL = 0.05


class VLLMAdapter(EngineAdapter):
    """One vLLM server. `model_root` is the model it was started with, as a path or a name."""

    def __init__(
        self,
        url: str,
        http: HttpClient,
        version: PolicyVersion,
        *,
        model_root: str | None,
    ) -> None:
        super().__init__(url, http, version)
        self._model_dir = Path(model_root) if model_root and Path(model_root).is_dir() else None
        self._vocab_size = None if self._model_dir is None else read_vocab_size(self._model_dir)
        self._is_dev_mode = True

    async def sync_label(self) -> None:
        """Take the version from the label of the server's weights, or label them with this adapter's version."""
        try:
            label = await self._get_label()
        except ProviderError:
            self._is_dev_mode = False  # it can be sampled from, but not updated
            return
        if label == UNDEFINED_POLICY:
            self.version = PolicyVersion(UNDEFINED_POLICY)
        elif (version := PolicyVersion.parse(label)) is not None:
            self.version = version
        else:
            await self.set_label(str(self.version))

    async def set_label(self, label: str) -> None:
        """Set the label of the server's weights."""
        await send_request(self._http, "POST", "/update_weight_version", {"new_version": label})

    async def _get_label(self) -> str:
        data = await send_request(self._http, "GET", "/weight_info")
        return str(decode_json(data, dict[str, Any], self.url).get("weight_version"))

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling, with the caches kept; running requests wait (`keep`) or end with the finish reason `abort`."""
        await send_request(self._http, "POST", "/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        """Resume sampling."""
        await send_request(self._http, "POST", "/resume")

    async def update(self, update: WeightUpdate) -> float:
        """Verify the directory, then pause, reload from its path, drop the cache, label and resume.

        If that fails in between, the weights have no version: the server stays paused with an undefined label, and its
        requests end with the finish reason `abort`. If it is cancelled, requests are kept.
        """
        if not self._is_dev_mode:
            raise WeightsRefused(f"{self.url} accepts no weights: vLLM must be started with VLLM_SERVER_DEV_MODE=1")
        verify = partial(verify_weights, update.directory, self._model_dir)
        manifest = await call_storage(verify, f"verify {update.directory}")
        if manifest.version != update.version:
            raise WeightsRefused(f"{update.directory} holds {manifest.version}, not {update.version}")
        start = time.perf_counter()
        await self.pause("keep")
        try:
            await self.set_label(UNDEFINED_POLICY)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.directory)}}
            await send_request(self._http, "POST", "/collective_rpc", reload)
            if update.kv_mode == "recompute":
                await self._reset_prefix_cache()
            await self.set_label(str(update.version))
        except BaseException as error:
            self.version = PolicyVersion(UNDEFINED_POLICY)
            if isinstance(error, Exception):
                with contextlib.suppress(RamifyError, RequestFailed):  # the first failure is the one to report
                    await self.pause("abort")
            raise
        self.version = update.version
        await self.resume()
        return time.perf_counter() - start

    async def _reset_prefix_cache(self) -> None:
        """Empty the cache. The server responds 200 with `success: false` while a request holds a block."""
        deadline = time.monotonic() + RESET_TIMEOUT
        while True:
            data = await send_request(self._http, "POST", "/reset_prefix_cache", reset_running_requests="true")
            if decode_json(data, dict[str, Any], self.url).get("success"):
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self.url} has new weights, but its prefix cache could not be reset within {RESET_TIMEOUT:g} s: "
                    "requests hold blocks of it"
                )
            await asyncio.sleep(RESET_POLL_INTERVAL)

    def _build_body(self, request: GenerateRequest) -> dict[str, Any]:
        self._check_token_ids(request.prompt_ids)
        if request.images:
            raise ModelUnsupported("images are not sent to vLLM; serve this model with the native engine")
        return {**request.to_dict(), "cache_salt": self.versioned_cache_salt(request.cache_salt)}

    def versioned_cache_salt(self, cache_salt: str | None) -> str:
        """Return a cache salt that includes the version, so that a request never reuses KV blocks of other weights.

        It is a digest, because vLLM accepts 128 characters at most and not all of them.
        """
        return hashlib.sha256(f"{self.version}|{cache_salt or ''}".encode()).hexdigest()

    def _parse_version_spans(self, choice: GenerateChoice, num_tokens: int) -> tuple[VersionSpan, ...]:
        spans = choice.weight_versions or []
        ends = [0, *(span.end for span in spans)]
        if ends[-1] != num_tokens or any(span.start != end or span.end <= end for span, end in zip(spans, ends)):
            raise ProviderError(f"{self.url} returned {num_tokens} tokens whose versions do not add up: {spans}")
        return tuple(VersionSpan(*self._parse_label(span.version), span.end - span.start) for span in spans)

    def _parse_label(self, label: str) -> PolicyVersion:
        """Return the version that a label names. Outside development mode neither weights nor label can change."""
        version = PolicyVersion.parse(label)
        if version is None and self._is_dev_mode:
            raise UnknownWeights(f"{self.url} sampled from weights with the label {label!r}, which is not a version")
        return version or self.version

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Reject ids outside the vocabulary: without a tokenizer vLLM does not check them, and would crash."""
        size = self._vocab_size
        if size is not None and len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < size:
            invalid = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise RequestInvalid(f"the prompt holds token id {invalid}; the vocabulary is 0 to {size - 1}")
