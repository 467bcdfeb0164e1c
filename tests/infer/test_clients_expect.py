"""What evaluation tools and client libraries need beyond chat: scoring, tokens, model names, errors in JSON."""

import re
import threading

import httpx
import msgspec
import pytest

from ramify.infer import control_api, openai_api
from ramify.trace import Message
from ramify.trace.version import PolicyVersion
from tests.support.models import build_core, publish_as, write_llama
from tests.support.native_server import ByteRenderer, ByteTokenizer, run_server


class FailingRenderer(ByteRenderer):
    """Raises an unexpected exception for one message."""

    def render(self, messages, tools=(), **options):
        if messages[0].text == "fail":
            raise LookupError("an unexpected error")
        return super().render(messages, tools, **options)


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    source = write_llama(models / "source", seed=3, positions=256)
    directory = publish_as(models / "v1", source, PolicyVersion("llama", 0, 1))
    core = build_core(directory, kv_cache_tokens=4096, max_running_requests=4)
    running = run_server(core, name="org/llama", renderer=FailingRenderer())
    with running as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        yield client


def complete(http, **fields):
    response = http.post("/v1/completions", json={"seed": 1, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


# -- scoring a prompt --------------------------------------------------------------------------------------------------


def test_echo_returns_prompt_and_logprobs_before_the_reply(http):
    (choice,) = complete(http, prompt="hello", max_tokens=2, logprobs=2, echo=True)["choices"]
    (without_echo,) = complete(http, prompt="hello", max_tokens=2, logprobs=2)["choices"]
    ids = ByteRenderer().encode("hello")
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
    scores = http.post("/inference/v1/generate", json=body).json()["prompt_logprobs"]
    assert choice["text"] == "hello" + without_echo["text"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"hello", *without_echo["logprobs"]["tokens"]]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = [score[str(id)]["logprob"] for id, score in zip(ids[1:], scores[1:], strict=True)]
    assert logprobs["token_logprobs"][1:5] == pytest.approx(expected, abs=1e-4)
    assert logprobs["token_logprobs"][5:] == pytest.approx(without_echo["logprobs"]["token_logprobs"], abs=1e-4)
    for token, value, top in zip(logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:]):
        assert 2 <= len(top) <= 3 and top[token] == value  # the token itself is always included
        assert max(top.values()) >= value


def test_echo_without_reply_scores_the_prompt(http):
    (greedy,) = complete(http, prompt=[5, 6], max_tokens=6, temperature=0, return_token_ids=True)["choices"]
    path = [5, 6, *greedy["token_ids"]]
    response = complete(http, prompt=[path, [5, 6, 7]], max_tokens=0, temperature=0, logprobs=1, echo=True)
    assert [len(choice["logprobs"]["tokens"]) for choice in response["choices"]] == [8, 3]
    assert response["usage"]["completion_tokens"] == 0
    scored = response["choices"][0]["logprobs"]
    assert all(
        value == max(top.values()) for value, top in zip(scored["token_logprobs"][2:], scored["top_logprobs"][2:])
    )
    assert response["choices"][0]["finish_reason"] == "length"
    assert complete(http, prompt="hello", max_tokens=0, echo=True)["choices"][0]["text"] == "hello"


def test_echo_separates_token_ids_of_prompt_and_reply(http):
    fields = {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True, "logprobs": 0, "return_token_ids": True}
    (choice,) = complete(http, **fields)["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7] and len(choice["token_ids"]) == 2
    assert {len(column) for column in choice["logprobs"].values()} == {5}
    assert choice["logprobs"]["top_logprobs"][1:] == [
        {token: value}
        for token, value in zip(choice["logprobs"]["tokens"][1:], choice["logprobs"]["token_logprobs"][1:], strict=True)
    ]


def test_generate_returns_the_likeliest_tokens_of_a_prompt_from_a_token_on(http):
    params = {"max_tokens": 1, "prompt_logprobs": 3, "logprobs_start": 2}
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": params}
    scores = http.post("/inference/v1/generate", json=body).json()["prompt_logprobs"]
    assert scores[:2] == [None, None]
    for token, table in zip("78", scores[2:], strict=True):
        assert token in table and 3 <= len(table) <= 4
    del params["prompt_logprobs"]
    response = http.post("/inference/v1/generate", json=body)
    assert response.status_code == 400 and "logprobs_start: it needs prompt_logprobs" in response.text


def test_prompt_logprobs_are_returned_on_request(http):
    (choice,) = complete(http, prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and [list(row) for row in others] == [["6"], ["7"]]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    assert len(http.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]) == 5
    assert "prompt_logprobs" not in complete(http, prompt=[5, 6, 7], max_tokens=1)["choices"][0]


# -- errors ------------------------------------------------------------------------------------------------------------

USER, FAILING = ([{"role": "user", "content": text}] for text in ("x", "fail"))
DEEP = b'{"prompt": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEP_TOOL = (
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}"
)


STREAMED = {"prompt": "x", "stream": True}
INVALID_REQUESTS = [
    ("/v1/completions", DEEP, "nested"),
    ("/v1/chat/completions", DEEP_TOOL, "nested"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {}, "prompt or messages"),
    ("/v1/completions", {**STREAMED, "echo": True}, "echo"),
    ("/v1/completions", {**STREAMED, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/completions", {**STREAMED, "prompt_logprobs": 0}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 5}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 1}, "presence_penalty"),
    ("/v1/completions", {"prompt": "x", "guided_json": {}}, "guided_json"),
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/chat/completions", {"messages": USER, "echo": True}, "echo"),
]
OTHER_ERRORS = [
    ("GET", "/nothing", None, 404, "not_found_error", "GET /nothing"),
    ("GET", "/v1/models/other", None, 404, "not_found_error", "org/llama"),
    ("GET", "/v1/completions", None, 405, "method_not_allowed", "GET /v1/completions"),
    ("POST", "/health", b"{}", 405, "method_not_allowed", "POST /health"),
    ("POST", "/v1/chat/completions", {"messages": FAILING}, 500, "UnknownFailure", "LookupError"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "type", "message"),
    [
        *OTHER_ERRORS,
        *(("POST", path, body, 400, "RequestInvalid", message) for path, body, message in INVALID_REQUESTS),
    ],
)
def test_every_error_is_json_with_its_reason(http, method, path, body, status, type, message):
    content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    response = http.request(method, path, content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (type, status)
    assert message in error["message"]
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 300}),
        ("/v1/completions", {"prompt": "x" * 300}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 255}]}),
        ("/inference/v1/generate", {"token_ids": [5] * 300}),
    ],
)
def test_context_overflow_has_the_code_and_words_that_clients_look_for(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("ContextOverflow", "context_length_exceeded")
    assert "This model's maximum context length is 256 tokens" in error["message"]


# -- model names and tokens --------------------------------------------------------------------------------------------


def test_model_card_is_found_by_name(http):
    (card,) = http.get("/v1/models").json()["data"]
    assert http.get("/v1/models/org/llama").json() == card
    assert isinstance(card["created"], int)


def test_tokenize_and_detokenize(http):
    response = http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()
    ids = ByteRenderer().encode("hello")
    assert response == {"count": 5, "max_model_len": 256, "tokens": ids, "token_strs": [*"hello"]}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["tokens"] == ByteRenderer().render([Message("user", "hi")]).token_ids.tolist()
    assert http.get("/tokenizer_info").json()["eos_token"] == "<2>"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_unknown_role_is_rejected(http, path):
    messages = [{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]
    message = http.post(path, json={"messages": messages}).json()["error"]["message"]
    assert re.match(r"messages\.1\.role: expected .*, got 'wizard'", message)


@pytest.mark.parametrize(
    ("path", "fields", "length"),
    [
        ("/tokenize", {"return_token_strs": True}, 1),
        ("/v1/completions", {"echo": True, "max_tokens": 0, "logprobs": 1}, len("hello")),
    ],
)
def test_large_prompt_is_decoded_outside_the_event_loop(http, monkeypatch, path, fields, length):
    original, threads = ByteTokenizer.decode, set()

    def record_thread(self, ids, **options):
        if len(ids) == length:  # not the sampled token
            threads.add(threading.current_thread().name)
        return original(self, ids, **options)

    monkeypatch.setattr(openai_api, "OFFLOAD_MIN_TOKENS", 5)
    monkeypatch.setattr(control_api, "OFFLOAD_MIN_TOKENS", 5)
    monkeypatch.setattr(ByteTokenizer, "decode", record_thread)
    http.post(path, json={"prompt": "hello", **fields}).raise_for_status()
    assert threads and "test-server" not in threads
