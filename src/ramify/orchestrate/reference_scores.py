"""Scores of another model: the logprobs of sampled tokens under a teacher or a reference.

A rollout is a tree, and each of its nodes is scored once. One request scores the path from a root to a node, but
returns logprobs only from the first node on that no other request scores; the engine has the tokens before it in its
prefix cache. Requests that fork from the scored part of another one are sent after it, because a prefix is cached only
once it is computed.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ramify.core.async_calls import cancel_all
from ramify.core.errors import DataCorrupt, ModelUnsupported
from ramify.infer.client import InferenceClient
from ramify.orchestrate.algorithms import Algorithm
from ramify.run.store.ledger import GroupRecord
from ramify.trace import Annotation, Trace
from ramify.trace.columns import Float32Array, Int32Array, StructuredArray

MAX_CONCURRENT_REQUESTS = 64

NodeKey = tuple[str, int]  # trace id and node


@dataclass(frozen=True, slots=True, eq=False)
class NodeScore:
    """The logprobs of the annotated tokens of a node, and the likeliest tokens at each [tokens, k] if they are used."""

    logprobs: Float32Array
    top_logprobs: StructuredArray | None = None


NodeScores = dict[NodeKey, NodeScore]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreModel:
    """A model that scores: its name in `[models]`, a client of its servers, and the seconds that a request may take."""

    name: str
    client: InferenceClient
    timeout: float


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """One path to score from token `start` on. `spans` are the tokens [begin, stop) of each node it scores."""

    token_ids: Int32Array
    start: int
    spans: dict[NodeKey, tuple[int, int]]
    wave: int  # requests of a wave are sent together, after the wave before


def plan_requests(traces: Sequence[Trace], annotations: Sequence[Annotation]) -> list[ScoreRequest]:
    """Return the requests that score every annotated node whose weights need a reference, each node once."""
    spans_by_trace: dict[str, dict[int, tuple[int, int] | None]] = {}  # None: all sampled tokens of the node
    for annotation in annotations:
        if annotation.needs_reference and annotation.ref_logprobs is None:
            spans_by_trace.setdefault(annotation.trace_id, {})[annotation.node] = annotation.span
    return [
        request
        for trace in traces
        if trace.id in spans_by_trace
        for request in _plan_trace(trace, spans_by_trace[trace.id])
    ]


def _plan_trace(trace: Trace, spans: Mapping[int, tuple[int, int] | None]) -> list[ScoreRequest]:
    graph, requests = trace.graph, list[ScoreRequest]()
    wave_by_node: dict[int, int] = {}  # of the request that scores the node
    for last_node in sorted(spans, reverse=True):  # children follow their parents, so a path is found by its end
        if last_node in wave_by_node:
            continue
        offset, wave, node_spans = 0, 0, dict[NodeKey, tuple[int, int]]()
        for node in graph.path_nodes(last_node):
            size = graph.token_stop(node) - graph.token_start(node)
            if node in wave_by_node:
                wave = wave_by_node[node] + 1
            elif node in spans:
                begin, stop = spans[node] or trace.nodes[node].sampled_span
                node_spans[trace.id, node] = (offset + begin, offset + stop)
            offset += size
        for _, node in node_spans:
            wave_by_node[node] = wave
        end = max(stop for _, stop in node_spans.values())
        start = min(begin for begin, _ in node_spans.values())
        requests.append(ScoreRequest(graph.path_tokens(last_node)[:end], start, node_spans, wave))
    return requests


class ReferenceScorer:
    """Scores groups with other models, which are given by source.

    `waits` has, by the number of a group that is being scored, the name of the model and the monotonic time at which
    scoring began.
    """

    def __init__(self, models: Mapping[str, ScoreModel]) -> None:
        self._models = models
        self.waits: dict[int, tuple[str, float]] = {}

    async def score(self, group: GroupRecord, traces: Sequence[Trace], algorithm: Algorithm) -> NodeScores | None:
        """Return the scores that the algorithm needs; None if its source has no model, or a reward is missing."""
        model = self._models.get(group.source)
        if model is None or any(trace.reward is None for trace in traces):
            return None
        self.waits[group.number] = (model.name, time.monotonic())
        try:
            annotations, _ = algorithm.annotate_with_state(traces, {})  # which tokens they have depends on no state
            return await score_annotations(
                model.client, traces, annotations, session=str(group.number), timeout=model.timeout
            )
        finally:
            del self.waits[group.number]


async def score_annotations(
    client: InferenceClient, traces: Sequence[Trace], annotations: Sequence[Annotation], *, session: str, timeout: float
) -> NodeScores:
    """Return the scores that the annotations need. Raises the first failure of a request.

    Requests with the same `session` go to one server, whose prefix cache they share. Raises ModelUnsupported if a trace
    has images, because requests for scores carry none.
    """
    requests, scores = plan_requests(traces, annotations), NodeScores()
    if requests and any(trace.graph.media_refs.size for trace in traces):
        raise ModelUnsupported(
            "rollouts with images cannot be scored by a teacher or reference yet; use an algorithm without one"
        )
    limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    top_k = max((annotation.top_k for annotation in annotations), default=0)

    async def send(request: ScoreRequest) -> tuple[Float32Array, StructuredArray | None]:
        token_ids = request.token_ids.tolist()
        async with limit:
            if top_k:
                return await client.score_top(token_ids, top_k, session=session, timeout=timeout, start=request.start)
            return await client.score(token_ids, session=session, timeout=timeout, start=request.start), None

    for wave in sorted({request.wave for request in requests}):
        in_wave = [request for request in requests if request.wave == wave]
        tasks = [asyncio.create_task(send(request)) for request in in_wave]
        try:
            for request, (logprobs, top) in zip(in_wave, await asyncio.gather(*tasks), strict=True):
                for key, (begin, stop) in request.spans.items():
                    scores[key] = NodeScore(logprobs[begin:stop], None if top is None else top[begin:stop])
        finally:
            await cancel_all(tasks)
    return scores


def uses_top_logprobs(algorithm: Algorithm, traces: Sequence[Trace]) -> bool:
    """Return whether the algorithm uses the likeliest tokens of another model for these traces."""
    annotations, _ = algorithm.annotate_with_state(traces, {})  # which tokens they have depends on no state
    return any(annotation.top_k for annotation in annotations)


def encode_scores(scores: NodeScores) -> bytes:
    """Return the scores as the ledger stores them, without the likeliest tokens."""
    rows = [(trace_id, node, np.asarray(score.logprobs, "<f4").tobytes()) for (trace_id, node), score in scores.items()]
    return msgspec.msgpack.encode(rows)


def decode_scores(data: bytes) -> NodeScores:
    """Return the scores that `encode_scores` encoded. Raises DataCorrupt."""
    try:
        rows = msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes]])
        return {(trace_id, node): NodeScore(np.frombuffer(values, "<f4")) for trace_id, node, values in rows}
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataCorrupt(f"stored reference scores cannot be read: {error}") from error
