"""The scripted server, with which slow tests run agents, says its script."""

import json

from ramify.infer.config import EngineConfig
from ramify.infer.request import SamplingParams
from ramify.model.load import load_engine_model
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.trace.version import PolicyVersion
from tests.support.scripted_server import ScriptedCore


def test_core_says_the_script_and_logs_the_call(tmp_path):
    path = resolve_model_path("tiny")
    renderer = load_renderer(path)
    core = ScriptedCore(
        load_engine_model(path),
        EngineConfig(kv_cache_tokens=256),
        PolicyVersion("tiny"),
        script=lambda prompt, seed: f"{prompt} seed {seed}",
        renderer=renderer,
        calls=tmp_path / "calls.jsonl",
    )
    prompt = renderer.tokenizer.encode("Count.").ids.tolist()
    request = core.create_request(prompt, SamplingParams(seed=7, max_tokens=64, stop_ids=frozenset(renderer.stop_ids)))
    core.enqueue(request)
    while core.has_unfinished_requests:
        core.step()
    reply = request.token_ids[len(prompt) : -1]
    assert renderer.tokenizer.decode(reply) == "Count. seed 7"
    (call,) = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    assert (call["tokens"], call["logprobs"]) == ([*reply, renderer.stop_ids[0]], request.logprobs)
