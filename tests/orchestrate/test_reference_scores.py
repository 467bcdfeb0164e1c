"""Scores of another model: every node once, along the tree, by a real engine whose counters say what it computed."""

from random import Random

import numpy as np
import pytest
import torch

from ramify.core.errors import ModelUnsupported, RamifyError
from ramify.infer.client import InferenceClient
from ramify.orchestrate.algorithms.opd import Opd, OpdConfig
from ramify.orchestrate.reference_scores import (
    plan_requests,
    score_annotations,
)
from ramify.trace import Media, MediaRef, Message, Trace
from tests.support.models import VOCAB, build_core, reference, write_llama
from tests.support.native_server import run_server

REPLY = 160
OPD = Opd(OpdConfig())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A native server, its core and transformers' own model."""
    directory = write_llama(tmp_path_factory.mktemp("model"), positions=2048)
    core = build_core(directory, kv_cache_tokens=16384, max_num_batched_tokens=1024, block_size=16)
    with run_server(core) as (url, _):
        yield url, core, reference(directory)


def tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCAB) for _ in range(count)]


def add_reply(trace: Trace, parent: int, rng: Random) -> int:
    ids = [3, *tokens(rng, REPLY)]
    span = (1, 1 + REPLY)
    return trace.graph.add_node(parent, Message("assistant", ""), ids, sampled_span=span, logprobs=[-1.0] * REPLY)


def build_group(rng: Random, size: int) -> list[Trace]:
    """Attempts at one prompt, with one reply each."""
    prompt, traces = tokens(rng, 203), [Trace(id=f"a{index}") for index in range(size)]
    for trace in traces:
        add_reply(trace, trace.graph.add_node(-1, Message("user", ""), prompt), rng)
    return traces


def build_forked_trace(rng: Random) -> list[Trace]:
    """One trace with a turn that three others continue, one of which forks again."""
    trace = Trace(id="forked")
    first = add_reply(trace, trace.graph.add_node(-1, Message("user", ""), tokens(rng, 101)), rng)
    second, third = (
        add_reply(trace, trace.graph.add_node(first, Message("user", ""), tokens(rng, 40)), rng) for _ in "ab"
    )
    for parent in (second, second, third, first):
        add_reply(trace, trace.graph.add_node(parent, Message("user", ""), tokens(rng, 35)), rng)
    return [trace]


@pytest.mark.parametrize(
    ("build", "seed"), [(lambda rng: build_group(rng, 16), 1), (build_forked_trace, 7)], ids=["group", "forks"]
)
async def test_a_tree_is_scored_with_at_most_a_tenth_more_tokens_than_it_has(served, build, seed):
    url, core, model = served
    traces = build(Random(seed))  # seeds differ: the cache keeps what was scored before
    annotations = OPD.annotate(traces)

    before = core.counters.computed_tokens
    async with InferenceClient(url) as client:
        scores = await score_annotations(client, traces, annotations, session="g", timeout=60)
    num_unique = sum(trace.total_tokens for trace in traces) - sum(
        len(trace.nodes[0].token_ids) for trace in traces[1:]
    )
    assert core.counters.computed_tokens - before <= 1.1 * num_unique
    assert scores.keys() == {(annotation.trace_id, annotation.node) for annotation in annotations}
    for trace in traces:
        for node in trace.sampled_nodes:
            path = torch.tensor(trace.graph.path_tokens(node))
            with torch.no_grad():
                logprobs = model(path[None]).logits[0].log_softmax(-1)
            expected = logprobs[:-1].gather(1, path[1:, None])[-REPLY:, 0]
            assert scores[trace.id, node].logprobs == pytest.approx(expected.numpy(), abs=1e-3)


def test_requests_that_share_a_scored_prefix_are_sent_one_after_the_other():
    (trace,) = build_forked_trace(Random(2))
    requests = plan_requests([trace], OPD.annotate([trace]))
    scored = [node for request in requests for _, node in request.spans]
    assert sorted(scored) == trace.sampled_nodes and len(set(scored)) == len(scored)
    for request in requests:
        path = request.token_ids.tolist()
        for other in requests:
            shared = int(np.logical_and.accumulate([a == b for a, b in zip(path, other.token_ids.tolist())]).sum())
            if other is not request and other.start < shared and request.start >= shared:
                assert other.wave < request.wave


@pytest.mark.parametrize("top_k", [1, VOCAB])
async def test_the_engine_returns_the_likeliest_tokens_of_every_position(served, top_k):
    url, _, model = served
    trace, *_ = build_group(Random(11), 1)
    annotations = Opd(OpdConfig(top_k=top_k)).annotate([trace])
    async with InferenceClient(url) as client:
        scores = await score_annotations(client, [trace], annotations, session="top", timeout=60)
    for node in trace.sampled_nodes:
        path = torch.tensor(trace.graph.path_tokens(node))
        with torch.no_grad():
            logprobs = model(path[None]).logits[0].log_softmax(-1)[-REPLY - 1 : -1]
        top = scores[trace.id, node].top_logprobs
        assert top.shape == (REPLY, top_k)
        assert top["logprob"] == pytest.approx(logprobs.topk(top_k).values.numpy(), abs=1e-3)
        own = logprobs.gather(1, torch.from_numpy(top["token"].astype(np.int64)))
        assert top["logprob"] == pytest.approx(own.numpy(), abs=1e-3)


async def test_more_tokens_than_the_vocabulary_has_are_refused_by_name(served):
    with pytest.raises(RamifyError, match=r"top_k|prompt_logprobs"):
        async with InferenceClient(served[0]) as client:
            await client.score_top([4, 5, 6], VOCAB + 1)


async def test_rollouts_with_images_are_refused_by_name():
    trace = Trace(id="seen")
    image = MediaRef(0, trace.add_media(Media.from_bytes(b"picture", "image/png")), 0, 2)
    prompt = trace.graph.add_node(-1, Message("user", ""), [1, 1, 2], media=[image])
    add_reply(trace, prompt, Random(0))
    trace.rewards = {"score": (1.0, 1.0)}
    annotations, _ = OPD.annotate_with_state([trace], {})
    with pytest.raises(ModelUnsupported, match="images"):
        await score_annotations(None, [trace], annotations, session="0", timeout=1.0)
