"""Replies that follow a grammar: in the engine, on the CPU or on a GPU (RAMIFY_TEST_DEVICE=cuda), and over HTTP."""

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from ramify.core.errors import RequestInvalid
from ramify.infer.grammar import GrammarCompiler, GrammarState, build_grammar
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.model.render import load_renderer
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path
from ramify.trace.version import PolicyVersion
from tests.support.models import DEVICE, build_core, reference, run, sampled_ids, scores, write_llama
from tests.support.native_server import run_server

VOCAB = 300  # 17 more tokens than the tokenizer has: logits are often padded
STOP_ID = 258
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
USER = [{"role": "user", "content": "Reverse: abc"}]
SAMPLING = {"temperature": 1.0, "seed": 1, "logit_bias": {"198": -100}}  # no line breaks, which would make replies long


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("models") / "source", seed=5, vocab=VOCAB)


@pytest.fixture(scope="module")
def core(source):
    return build_core(source)


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(resolve_model_path("tiny")), vocab_size=VOCAB, stop_ids=[STOP_ID])


def compile_schema(schema: dict[str, Any]) -> GrammarState:
    return asyncio.run(make_compiler().compile(build_grammar({"json": schema})))


def read_reply(request: EngineRequest) -> Any:
    assert sampled_ids(request)[-1] == STOP_ID
    return json.loads(Tokenizer(resolve_model_path("tiny")).decode(sampled_ids(request)[:-1]))


def check_object(value: Any) -> None:
    assert list(value) == ["color", "count", "tags"]
    assert value["color"] in ("red", "green") and 0 <= value["count"] <= 99
    assert len(value["tags"]) <= 2 and all(len(tag) <= 3 for tag in value["tags"])


def list_allowed(state: GrammarState) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(state.matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB])


def test_replies_of_a_random_model_always_follow_their_grammar(core):
    """Requests with and without a grammar share the steps; those without sample what they sample alone."""
    params = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"temperature": 2.0},
        {"top_logprobs": 3},
        {"logit_bias": ((90, 5.0),)},
    ]

    def create_plain(seed):
        return core.create_request([7, 8, 9], SamplingParams(max_tokens=40, seed=seed))

    alone = [run(core, create_plain(seed))[0] for seed in range(2)]
    state = compile_schema(SCHEMA)
    with_grammar = [
        core.create_request(
            [seed, 4, 5],
            SamplingParams(max_tokens=200, seed=seed, stop_ids=frozenset([STOP_ID]), **fields),
            grammar=state.fork(),
        )
        for seed, fields in enumerate(params * 2)
    ]
    plain = [create_plain(seed) for seed in range(2)]
    run(core, *with_grammar, *plain)
    for request in with_grammar:
        assert request.finish_reason == "stop" and request.error is None
        check_object(read_reply(request))
    assert [sampled_ids(request) for request in plain] == [sampled_ids(request) for request in alone]


@pytest.mark.promise
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logprobs_are_those_of_the_allowed_tokens(core, source, temperature):
    """A logprob is log softmax over the tokens that the grammar allows: the distribution that was sampled from."""
    state = compile_schema(SCHEMA)
    sampling = SamplingParams(max_tokens=60, seed=1, temperature=temperature, stop_ids=frozenset([STOP_ID]))
    num_replayed = core.counters.replayed_steps
    (request,) = run(core, core.create_request([11, 12, 13], sampling, grammar=state.fork()))
    if DEVICE == "cuda":  # the steps were CUDA graphs
        assert core.counters.replayed_steps - num_replayed > len(request.logprobs) // 2
    logprobs = scores(reference(source), request.token_ids, temperature)
    for index, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs, strict=True)):
        allowed = list_allowed(state)
        expected = logprobs[2 + index, token] - logprobs[2 + index, allowed].logsumexp(0)
        assert token in allowed and logprob == pytest.approx(expected.item(), abs=1e-4)
        assert state.advance(token) is None


def test_top_logprobs_list_only_allowed_tokens(core):
    state = compile_schema({"const": "ab"})
    sampling = SamplingParams(max_tokens=9, top_logprobs=5, stop_ids=frozenset([STOP_ID]))
    (request,) = run(core, core.create_request([3], sampling, grammar=state.fork()))
    assert read_reply(request) == "ab"
    for token, top in zip(sampled_ids(request), request.top_logprobs, strict=True):
        assert {other for other, _ in top} == set(list_allowed(state).tolist())
        assert sum(np.exp(value) for _, value in top) == pytest.approx(1)
        state.advance(token)


def test_max_tokens_cuts_a_reply_with_a_grammar(core):
    sampling = SamplingParams(max_tokens=4, stop_ids=frozenset([STOP_ID]))
    (request,) = run(core, core.create_request([3], sampling, grammar=compile_schema(SCHEMA)))
    assert (request.finish_reason, len(request.logprobs)) == ("length", 4)


def test_grammar_that_cannot_be_followed_fails_its_own_request_only(core):
    broken = compile_schema(SCHEMA)
    broken.advance(7)  # as after a limit of the library: the state is an error from now on
    sampling = SamplingParams(max_tokens=200, stop_ids=frozenset([STOP_ID]))
    failed, other = run(
        core,
        core.create_request([3], sampling, grammar=broken),
        core.create_request([3], sampling, grammar=compile_schema(SCHEMA)),
    )
    assert failed.finish_reason == "abort" and isinstance(failed.error, RequestInvalid)
    check_object(read_reply(other))


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    with pytest.raises(RequestInvalid, match=r"lacks llguidance; pip install 'ramify\[local\]'"):
        compile_schema(SCHEMA)


def test_tokenizer_that_the_library_does_not_support_is_named(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(Tokenizer(tmp_path), vocab_size=2, stop_ids=[0])
    with pytest.raises(RequestInvalid, match="does not support the model's tokenizer"):
        asyncio.run(compiler.compile('start: "a"'))


def test_weights_may_change_during_a_reply_with_a_grammar(core, source):
    from ramify.model.weights import stage_weights
    from tests.support.models import publish_as

    version = PolicyVersion("llama", 0, 1)
    staged = stage_weights(publish_as(source.parent / "v1", source, version), core.model.module)
    sampling = SamplingParams(max_tokens=200, stop_ids=frozenset([STOP_ID]))
    request = core.create_request([3, 4], sampling, grammar=compile_schema(SCHEMA))
    core.enqueue(request)
    for _ in range(5):
        core.step()
    core.swap_weights(staged)
    run(core)
    check_object(read_reply(request))
    assert len(request.version_starts) == 2


# -- HTTP --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http():
    model = resolve_model_path("tiny")
    core = build_core(model, dtype="float32", kv_cache_tokens=8192, max_running_requests=8)
    running = run_server(core, name="tiny", renderer=load_renderer(model))
    with running as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def chat(http, **fields) -> list[dict[str, Any]]:
    body = {"messages": USER, "max_tokens": 400, **SAMPLING, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def stream_chat(http, **fields) -> tuple[str, list[dict[str, Any]], str | None]:
    """Return the text, the tool calls and the finish reason of a stream."""
    body = {"messages": USER, "max_tokens": 400, "stream": True, **SAMPLING, **fields}
    text, calls, finish_reason = "", [], None
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                calls += choice["delta"].get("tool_calls") or []
                finish_reason = choice["finish_reason"] or finish_reason
    return text, calls, finish_reason


def json_schema(schema: dict[str, Any], **fields) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def test_json_schema_of_a_chat(http):
    response_format = json_schema(SCHEMA, strict=True)
    first, second = chat(http, response_format=response_format, n=2)
    for choice in (first, second):
        assert choice["finish_reason"] == "stop"
        check_object(json.loads(choice["message"]["content"]))
    text, _, finish_reason = stream_chat(http, response_format=response_format)
    assert (text, finish_reason) == (first["message"]["content"], "stop")


def test_json_object_of_a_chat(http):
    (choice,) = chat(http, response_format={"type": "json_object"}, max_tokens=100)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_tool_choice_of_a_chat(http, choice):
    (reply,) = chat(http, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    (call,) = reply["message"]["tool_calls"]
    assert reply["finish_reason"] == "tool_calls" and not reply["message"]["content"]
    if choice != "required":
        assert call["function"]["name"] == "paint"
    if call["function"]["name"] == "paint":
        check_object(json.loads(call["function"]["arguments"]))
    _, streamed, finish_reason = stream_chat(http, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert [call["function"] for call in streamed] == [call["function"]] and finish_reason == "tool_calls"


def test_json_schema_with_tools_allows_either(http):
    kinds = set()
    for seed in range(3):
        (reply,) = chat(
            http, tools=TOOLS[:1], response_format=json_schema(SCHEMA), seed=seed, parallel_tool_calls=False
        )
        calls = reply["message"]["tool_calls"] if reply["finish_reason"] == "tool_calls" else []
        check_object(json.loads(calls[0]["function"]["arguments"] if calls else reply["message"]["content"]))
        kinds.add(reply["finish_reason"])
    assert kinds <= {"stop", "tool_calls"}


def test_structured_output_of_responses_and_messages(http):
    text_format = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    body = {"input": "Reverse: abc", "max_output_tokens": 400, "text": {"format": text_format}}
    response = http.post("/v1/responses", json=body).json()
    (item,) = response["output"]
    check_object(json.loads(item["content"][0]["text"]))
    assert response["text"] == {"format": text_format}
    tool = {"name": "paint", "input_schema": SCHEMA}
    body = {"messages": USER, "max_tokens": 400, "tools": [tool], "tool_choice": {"type": "any"}}
    blocks = http.post("/v1/messages", json=body).json()["content"]
    check_object(blocks[0]["input"])


def test_structured_outputs_of_completions_and_of_token_ids(http):
    body = {"prompt": "Colour: ", "max_tokens": 300, "structured_outputs": {"json": SCHEMA}}
    for fields in (body, {**body, "structured_outputs": None, "response_format": json_schema(SCHEMA)}):
        check_object(json.loads(http.post("/v1/completions", json=fields).json()["choices"][0]["text"]))
    sampling = {"max_tokens": 9, "structured_outputs": {"grammar": 'start: "ab"'}}
    response = http.post("/inference/v1/generate", json={"token_ids": [5, 6], "sampling_params": sampling})
    ids = response.json()["choices"][0]["token_ids"]
    assert Tokenizer(resolve_model_path("tiny")).decode(ids) == "ab<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": json_schema({"type": "strin"})}, "Invalid type"),
        ({"response_format": json_schema({"not": {}}, strict=True)}, "Unimplemented keys"),
        ({"response_format": json_schema({"enum": ["x" * 100] * 20_000})}, "characters"),
        ({"response_format": json_schema({"properties": {f"p{i}": {} for i in range(4000)}})}, "too big"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "draw"}}}, "draw"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "no tools"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
)
def test_structured_output_that_cannot_be_served_is_refused_with_its_reason(http, fields, reason):
    response = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 4, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "RequestInvalid" and reason in error["message"]


def test_lenient_schema_ignores_what_cannot_be_enforced(http):
    (choice,) = chat(http, response_format=json_schema({"const": 5, "not": {"type": "string"}}))
    assert json.loads(choice["message"]["content"]) == 5


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_text_of_a_call_is_content_if_calls_are_forbidden(http, choice):
    grammar = {"grammar": 'start: <tool_call> "{\\"name\\": \\"stop\\", \\"arguments\\": {}}" </tool_call>'}
    (reply,) = chat(http, tools=TOOLS, tool_choice=choice, structured_outputs=grammar)
    assert reply["finish_reason"] == "stop" and not reply["message"].get("tool_calls")
    assert reply["message"]["content"] == '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert stream_chat(http, tools=TOOLS, tool_choice=choice, structured_outputs=grammar) == (
        reply["message"]["content"],
        [],
        "stop",
    )
