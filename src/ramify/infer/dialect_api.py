"""`/v1/responses` and `/v1/messages`: the dialects of the gateway, over the engine of this process.

A request is the only call of a session, whose trace is discarded with the response. So everything that the gateway does
with a request of these APIs is also done here. Only the replies that the Responses API may refer to are kept.
"""

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from ramify.infer.client import ClientSampling, Completion
from ramify.infer.client.generate_api import GenerateRequest, RequestImage
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.dialects.response_store import ResponseStore
from ramify.infer.engine import Engine
from ramify.infer.gateway import RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.infer.gateway.server import build_dialect_routes
from ramify.infer.generate_api import build_sample_requests
from ramify.infer.grammar import GrammarCompiler
from ramify.infer.images import ImageReference
from ramify.infer.request_bodies import GenerateBody
from ramify.infer.streaming import submit_all
from ramify.model.render import Renderer
from ramify.trace import Trace, Usage, VersionRun

DIALECT_PATHS = ("/responses", "/conversations", "/messages")
KEEPALIVE_INTERVAL = 5.0  # seconds between the keepalives of a stream that waits for its reply


class EngineTokenClient:
    """The token client of an engine in this process."""

    def __init__(self, engine: Engine, compiler: GrammarCompiler | None) -> None:
        self._engine, self._compiler = engine, compiler

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Sample tokens after `prompt` within `timeout` seconds. A cancelled call is cancelled in the engine too."""
        body = msgspec.convert(GenerateRequest(prompt, sampling).to_dict(), GenerateBody)
        loaded = [ImageReference(image.hash, image.start, image.stop, await image.load()) for image in images]
        requests = await build_sample_requests(body, self._engine, tuple(loaded), self._compiler)
        (stream,) = submit_all(self._engine, requests, timeout=timeout, incremental=False)
        try:
            output = await stream.result()
        finally:
            stream.cancel()
        assert output.finish_reason is not None
        return Completion(
            np.array(output.token_ids, np.int32),
            np.array(output.logprobs, np.float32),
            tuple(VersionRun(*version, count) for version, count in output.version_runs),
            output.finish_reason,
            Usage(len(prompt), len(output.token_ids), output.num_cached_tokens),
            "the engine",
        )


def build_routes(
    engine: Engine, *, name: str, renderer: Renderer, compiler: GrammarCompiler | None, timeout: float
) -> list[Route]:
    """Return the routes of the dialects for the model `name`."""
    max_model_len = engine.core.max_model_len
    policy = TokenPolicy(EngineTokenClient(engine, compiler), renderer, name, max_model_len=max_model_len)
    store = ResponseStore(keeps_messages=True)

    def open_session(_: HttpRequest) -> RolloutSession:
        return RolloutSession(
            Trace(id=uuid4().hex),
            policy,
            sampling=SamplingConfig(),
            limits=RolloutLimits(),
            models={Path(name).name: policy},
            serves_any_model=False,
            response_store=store,
            call_timeout=timeout,
            reconnect_timeout=0.0,
        )

    routes = build_dialect_routes(open_session, KEEPALIVE_INTERVAL)
    return [route for route in routes if route.path.replace("/v1", "").startswith(DIALECT_PATHS)]
