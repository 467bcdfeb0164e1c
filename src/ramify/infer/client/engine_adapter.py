"""The interface every inference engine is driven through; one adapter per engine implements it.

Engines have the same generate endpoint. They differ in how weights are updated, and in how a response says which tokens
came from which version of the weights.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ramify.core.errors import ImageMissing, RequestInvalid
from ramify.infer.client.completion import ClientSampling, Completion
from ramify.infer.client.generate_messages import (
    GENERATE_PATH,
    IMAGES_PATH,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    RequestImage,
    UploadReply,
    build_usage,
    decode_json,
    get_only_choice,
    get_sampled_tokens,
    parse_finish_reason,
    parse_prompt_logprobs,
    parse_top_logprobs,
)
from ramify.infer.client.http_client import HttpClient, read_body, send_request
from ramify.trace import VersionSpan
from ramify.trace.columns import StructuredArray
from ramify.trace.version import PolicyVersion

MAX_UPLOADS = 3  # of the images of one request; a server may drop an image while others are uploaded
KVMode = Literal["recompute", "keep"]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published directory to load. The server reads `directory` itself, so it must see the same file system."""

    directory: Path
    version: PolicyVersion
    kv_mode: KVMode = "recompute"
    run: str = ""
    """Identifies the run: an engine refuses weights of a trainer that was replaced by another of the same run."""


class UnknownWeights(Exception):
    """The server sampled from weights of unknown version: it was restarted, or a weight update was interrupted."""


class EngineAdapter(ABC):
    """One inference server.

    `version` is the version of the weights that its next token will come from. `copies_from_trainer` if it copies
    weights from the memory of a trainer on its device.
    """

    def __init__(self, url: str, http: HttpClient, version: PolicyVersion) -> None:
        self.url, self.version, self.copies_from_trainer = url, version, False
        self._http = http

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        response = await self._generate_with_images(request)
        choice = get_only_choice(response, self.url)
        token_ids, logprobs = get_sampled_tokens(choice, self.url)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=self._parse_version_spans(choice, len(token_ids)),
            finish_reason=parse_finish_reason(choice.finish_reason, self.url),
            usage=build_usage(response, request, len(token_ids)),
            server=self.url,
        )

    async def _generate_with_images(self, request: GenerateRequest) -> GenerateResponse:
        """Send a request; upload the images that the server does not have, and send it again.

        Raises ImageMissing if the server still misses one after several uploads, or RequestInvalid if the images of the
        request are larger than the server's cache.
        """
        body, sizes, cache_bytes = self._build_body(request), dict[str, int](), math.inf
        for num_uploads in range(MAX_UPLOADS + 1):
            try:
                return await self._send_generate(body)
            except ImageMissing as error:
                missing = {image.hash: image for image in request.images if image.hash in error.hashes}
                if not missing or (num_uploads == MAX_UPLOADS and sum(sizes.values()) <= cache_bytes):
                    raise
            if num_uploads < MAX_UPLOADS:
                for hash, image in missing.items():
                    sizes[hash], cache_bytes = await self._upload_image(image)
        problem = f"{len(sizes)} images of the prompt have {sum(sizes.values())} bytes"
        raise RequestInvalid(f"{problem}, and {self.url} keeps {cache_bytes}; raise inference.image_cache_mib")

    async def _upload_image(self, image: RequestImage) -> tuple[int, float]:
        """Upload an image; return its bytes, and how many bytes of images the server keeps (infinity if unknown)."""
        data = await asyncio.to_thread((await image.load()).encode)
        path = f"{IMAGES_PATH}/{image.hash}"
        response = await self._http.request("PUT", path, data, content_type="application/msgpack")
        reply = decode_json(read_body(self._http, path, response), UploadReply, self.url)
        return len(data), math.inf if reply.cache_bytes is None else reply.cache_bytes

    async def score(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, start: int = 0
    ) -> NDArray[np.float32]:
        """Return the logprob of every token from `start` on given those before it, at temperature 1.

        Tokens before `start` are NaN, and so is the first. An engine that knows `start` does not compute a cached
        prefix before it again.
        """
        response = await self._send_prompt(token_ids, cache_salt, start=start, num_logprobs=1)
        return parse_prompt_logprobs(response, token_ids, self.url, start=start)

    async def score_top(
        self, token_ids: Sequence[int], top_k: int, *, start: int = 0
    ) -> tuple[NDArray[np.float32], StructuredArray]:
        """Return what `score` returns, and the `top_k` likeliest tokens of each position [tokens, top_k]."""
        response = await self._send_prompt(token_ids, None, start=start, num_logprobs=max(2, top_k))
        logprobs = parse_prompt_logprobs(response, token_ids, self.url, start=start)
        return logprobs, parse_top_logprobs(response, self.url, start=start, top_k=top_k)

    async def _send_prompt(
        self, token_ids: Sequence[int], cache_salt: str | None, *, start: int, num_logprobs: int
    ) -> GenerateResponse:
        sampling = ClientSampling(temperature=0.0, max_tokens=1, ignore_eos=True)  # one token must be sampled too
        body = self._build_body(GenerateRequest(token_ids, sampling, cache_salt=cache_salt))
        body["sampling_params"] |= {"prompt_logprobs": num_logprobs, **self._build_logprobs_start(start)}
        return await self._send_generate(body)

    @abstractmethod
    async def update(self, update: WeightUpdate) -> float:
        """Load published weights and return the seconds it took; requests in flight continue with them."""

    @abstractmethod
    def _parse_version_spans(self, choice: GenerateChoice, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Return which version each sampled token came from. Raises ProviderError if that does not cover all tokens."""

    def _build_logprobs_start(self, start: int) -> dict[str, int]:
        """Return the sampling parameter for the first prompt logprob; empty if the engine always returns all."""
        return {}

    def _build_body(self, request: GenerateRequest) -> dict[str, Any]:
        return request.to_dict()

    async def _send_generate(self, body: dict[str, Any]) -> GenerateResponse:
        return decode_json(await send_request(self._http, "POST", GENERATE_PATH, body), GenerateResponse, self.url)
