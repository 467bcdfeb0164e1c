"""The native server: OpenAI's format, clear errors, and nothing left behind by clients that disconnect."""

import asyncio
import contextlib
import gc
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
import uvicorn

from ramify.core.errors import ProviderError
from ramify.infer.config import ServerConfig
from ramify.infer.cuda_runner import CudaModelRunner
from ramify.infer.engine import Engine
from ramify.infer.request import SamplingParams
from ramify.infer.response_formatters import IncrementalDetokenizer
from ramify.infer.server import serve
from ramify.trace import Message
from ramify.trace.version import PolicyVersion
from tests.support.models import build_core, publish_as, write_llama
from tests.support.native_server import ByteRenderer, ByteTokenizer, run_server

USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    source = write_llama(directory / "source", seed=3, positions=1024)
    return publish_as(directory / "v1", source, PolicyVersion("llama", 0, 1))


@pytest.fixture(scope="module")
def server(model):
    with run_server(build_core(model, kv_cache_tokens=8192, max_queued_requests=8, max_running_requests=4)) as (
        url,
        engine,
    ):
        yield url, engine


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server[0], timeout=30) as client:
        yield client


def complete(http, prompt: str | list[int] | list[str] = "hello", **fields):
    response = http.post("/v1/completions", json={"prompt": prompt, "seed": 1, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream_events(http, path, **fields):
    with http.stream("POST", path, json={"stream": True, "ignore_eos": True, "seed": 1, **fields}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [msgspec.json.decode(line) for line in lines]


def test_model_card_names_the_operators(http, server):
    """If they are not compiled, it names those that are used: of Triton, or of torch with the reason."""
    (card,) = http.get("/v1/models").json()["data"]
    runner = server[1].core.runner
    compiled = runner.compiled_ops is not None
    assert (card["operators"] == "compiled") == compiled
    assert compiled or card["operators"].startswith("Triton" if isinstance(runner, CudaModelRunner) else "torch (")
    assert f"ramify_compiled_operators {compiled:d}" in http.get("/metrics").text


def test_text_and_its_token_ids_give_the_same_completion(http):
    assert complete(http, "hello")["choices"] == complete(http, ByteRenderer().encode("hello"))["choices"]


def test_choices_are_ordered_by_prompt_and_sample(http):
    choices = complete(http, ["one", "two"], n=3, max_tokens=20)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices}) == 6
    assert choices[:3] == complete(http, "one", n=3, max_tokens=20)["choices"]


def test_stream_equals_the_complete_response(http):
    (choice,) = complete(http, max_tokens=30, logprobs=2)["choices"]
    parts = stream_events(http, "/v1/completions", prompt="hello", max_tokens=30, logprobs=2)
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    streamed = [value for part in parts for value in part["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_flat_logprobs_are_the_same_numbers(http, logprobs):
    """With alternatives a list of numbers would not do, so tables are returned."""
    body = {"token_ids": [5, 17, 33], "sampling_params": {"max_tokens": 8, "seed": 1, "logprobs": logprobs}}
    (table,) = http.post("/inference/v1/generate", json=body).json()["choices"]
    (choice,) = http.post("/inference/v1/generate", json={**body, "flat_logprobs": True}).json()["choices"]
    if logprobs:
        assert choice == table
    else:
        assert choice.pop("flat_logprobs") == [entry["logprob"] for entry in table.pop("logprobs")["content"]]
        assert choice == table


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_ends_the_text(http, server, stream):
    full_text = complete(http, max_tokens=400)["choices"][0]["text"]
    stop = full_text[20:23]
    if stream:
        parts = stream_events(http, "/v1/completions", prompt="hello", max_tokens=400, stop=stop)
        text = "".join(part["choices"][0]["text"] for part in parts)
        finish_reason = parts[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = complete(http, max_tokens=400, stop=[stop, "never there"])["choices"]
        text, finish_reason = choice["text"], choice["finish_reason"]
    assert text == full_text[: full_text.index(stop)]
    assert finish_reason == "stop"


def test_chat_completion_and_stream(http):
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 4}
    (choice,) = http.post("/v1/chat/completions", json={**fields, "logprobs": True, "top_logprobs": 2}).json()[
        "choices"
    ]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    parts = stream_events(http, "/v1/chat/completions", **{**fields, "stream_options": {"include_usage": True}})
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parts[0]["object"] == "chat.completion.chunk"
    assert parts[-1]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", b"{not json", 400, "malformed"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n: expected 1 to 128"),
        ("/v1/completions", {"prompt": "x", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 1e39}}, 400, "logit_bias: expected -1e+06 to 1e+06"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"messages": USER, "max_completion_tokens": 0},
            400,
            "max_tokens",
        ),
        ("/inference/v1/generate", {"token_ids": []}, 400, "empty"),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"stop": "x"}}, 400, "stop_token_ids"),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"logprobs": -1}}, 400, "top_logprobs"),
        ("/update_weights", {"path": "nowhere"}, 409, "manifest.json"),
        ("/update_weights", {"path": "nowhere", "kv": "burn"}, 400, "kv"),
        ("/pause", {"mode": "forever"}, 400, "mode"),
        ("/v1/chat/completions", {"messages": USER, "model": "x"}, 404, "'x' is not served here; expected llama,"),
        ("/nothing", {}, 404, ""),
    ],
)
def test_invalid_request_is_rejected_with_its_reason(http, path, body, status, message):
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    response = http.post(path, content=content)
    assert response.status_code == status
    assert message in response.text


WEB_PAGE_HEADERS = [
    {"Origin": "http://page.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "null"},
    {"Host": "page.example:8000"},
    {"Host": "page.example:8000", "Origin": "http://page.example:8000"},
    {"Host": "localhost.page.example"},
    {"Host": "127.0.0.1.page.example:8000"},
]
PROGRAM_HEADERS = [
    {},
    {"Host": "localhost:8000"},
    {"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000"},
    {"Host": "node-3:8000"},
    {"Host": "10.1.2.3:8000"},
    {"Host": "[::1]:8000"},
    {"Host": socket.gethostname()},
    {"Host": "engine.lab.example:8000"},
]


@pytest.mark.promise
def test_weights_of_a_replaced_trainer_are_refused(tmp_path, model):
    versions = {
        number: publish_as(tmp_path / f"{number}", model, PolicyVersion("llama", number, 1)) for number in (1, 2)
    }
    with run_server(build_core(model)) as (url, engine), httpx.Client(base_url=url, timeout=30) as http:

        def update(number, run):
            body = {"path": str(versions[number]), "run": run}
            response = http.post("/update_weights", json=body)
            return response.status_code, engine.core.version.incarnation

        assert update(1, "a") == (200, 1)
        assert update(2, "a") == (200, 2)
        assert update(1, "a") == (409, 2)
        assert update(2, "a") == (200, 2)
        assert update(1, "b") == (200, 1)  # another run begins with its first trainer
        assert update(2, "") == (200, 2)
        assert update(1, "") == (200, 1)  # by hand
        assert update(1, "a") == (409, 1)  # run a still has its second trainer


@pytest.mark.parametrize("headers", WEB_PAGE_HEADERS, ids=str)
def test_web_page_cannot_control_the_engine(http, server, model, headers):
    swaps = server[1].core.counters.swaps
    for path, body in {"/pause": {}, "/pause/": {}, "/resume": {}, "/update_weights": {"path": str(model)}}.items():
        response = http.post(path, json=body, headers=headers, follow_redirects=True)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "PeerRefused"
    assert (server[1].paused, server[1].core.counters.swaps) == (False, swaps)


@pytest.mark.parametrize("headers", PROGRAM_HEADERS, ids=str)
def test_programs_control_the_engine_by_every_accepted_host_name(http, headers):
    assert http.post("/pause", headers=headers).json() == {"status": "paused"}
    assert http.post("/resume", headers=headers).json() == {"status": "ok"}


async def test_full_queue_responds_503_and_frees_all_blocks(server):
    url, engine = server
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 3}}
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=60) as client:
        (await client.post("/pause")).raise_for_status()
        posts = [asyncio.ensure_future(client.post("/inference/v1/generate", json=body)) for _ in range(12)]
        done, _ = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        assert {post.result().status_code for post in done} == {503}
        assert done.pop().result().headers["retry-after"] == "1"
        await client.post("/resume")
        assert sorted([(await post).status_code for post in posts]) == [200] * 8 + [503] * 4
    assert engine.core.pool.num_free_blocks == engine.core.pool.num_usable_blocks


async def test_pause_with_abort_ends_running_requests(server):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "stream": True}
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=server[0], timeout=60) as client:
        async with client.stream("POST", "/inference/v1/generate", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await client.post("/pause", params={"mode": "abort"})
            remaining = [line async for line in lines if line.startswith("data: {")]
        await client.post("/resume")
    assert msgspec.json.decode(remaining[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_deadline_in_a_stream_is_an_error_event(http, server, path):
    fields = {"max_tokens": 900, "ignore_eos": True}
    body = {"token_ids": [5], "sampling_params": fields, "prompt": [5], **fields, "stream": True}
    with http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        http.post("/pause")  # so that it does not finish first
        for request in server[1].core.list_unfinished_requests():
            request.deadline = 0.0
        *_, last_event, end = (line.removeprefix("data: ") for line in lines if line)
        http.post("/resume")
    assert end == "[DONE]"
    error = msgspec.json.decode(last_event)["error"]
    assert (error["type"], error["code"]) == ("DeadlineExceeded", 504)


@pytest.fixture
def breaking_server(model):
    """The address of a server, and a function that makes its engine fail."""
    core = build_core(model, kv_cache_tokens=8192)
    must_fail, step = threading.Event(), core.step

    def step_or_fail():
        if must_fail.wait(0.01):  # slow, so that requests for hundreds of tokens are still running when it fails
            raise RuntimeError("the device is gone")
        return step()

    core.step = step_or_fail
    with run_server(core) as (url, _):
        yield url, must_fail.set


@pytest.fixture
def frozen_modules():
    """Freeze the objects of imported modules again: a server unfreezes them when it ends."""
    yield
    gc.freeze()


@pytest.mark.usefixtures("frozen_modules")
async def test_a_server_ends_when_its_engine_fails(model):
    core = build_core(model, kv_cache_tokens=8192)

    def fail_in_step():
        raise RuntimeError("the device is gone")

    core.step = fail_in_step
    engine = Engine(core)
    serving = asyncio.create_task(serve(engine, name="llama", config=ServerConfig(port=0)))
    async with asyncio.timeout(60):
        while not engine.failure and not serving.done():
            with contextlib.suppress(ProviderError):
                await engine.submit([5], SamplingParams(max_tokens=4)).result()
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="the device is gone") as caught:  # the error itself: a bug is shown
            await serving
    assert "fail_in_step" in [entry.name for entry in caught.traceback]
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("frozen_modules")
async def test_a_server_ends_when_its_http_server_fails(model, monkeypatch):
    async def crash_after_start(_, num_calls):
        if num_calls:
            raise RuntimeError("the event loop is broken")

    monkeypatch.setattr(uvicorn.Server, "on_tick", crash_after_start)
    engine = Engine(build_core(model))
    with pytest.raises(RuntimeError, match="the event loop is broken"):
        await asyncio.wait_for(serve(engine, name="llama", config=ServerConfig(port=0)), 60)
    assert engine.ended.done()


def test_engine_failure_is_reported_in_streams_and_responses(breaking_server):
    url, fail_engine = breaking_server
    fields = {"max_tokens": 900, "ignore_eos": True}
    bodies = {
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": fields},
        "/v1/completions": {"prompt": [5], **fields},
    }
    with httpx.Client(base_url=url, timeout=30) as http, contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(http.stream("POST", path, json={**body, "stream": True}))
            for path, body in bodies.items()
        ]
        lines = [response.iter_lines() for response in streams]
        assert all("choices" in next(stream_lines) for stream_lines in lines)
        fail_engine()
        remaining = [[line.removeprefix("data: ") for line in stream_lines if line] for stream_lines in lines]
        responses = [http.post(path, json=body) for path, body in bodies.items()]
    for (*_, last_event, end), response in zip(remaining, responses, strict=True):
        assert end == "[DONE]"
        assert msgspec.json.decode(last_event) == response.json()
        assert response.status_code == response.json()["error"]["code"] == 500
        assert response.json()["error"]["type"] == "ProviderError"
        assert "the device is gone" in response.json()["error"]["message"]


def test_detokenizer_holds_back_incomplete_text():
    detokenizer = IncrementalDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"), ["STOP"])
    texts = [detokenizer.decode_new([byte]) for byte in "é STOPPED".encode()]
    assert texts == ["", "é", " ", "", "", "", "", "", "", ""]
    assert detokenizer.text == "é " and detokenizer.stopped
    detokenizer = IncrementalDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"), ["STOP"])
    texts = [detokenizer.decode_new(b"a ST"), detokenizer.decode_new(b"X"), detokenizer.decode_new(b"S", is_last=True)]
    assert "".join(texts) == "a STXS"


def test_detokenizer_decodes_few_tokens_at_a_time():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return bytes(ids).decode("utf-8", "replace")

    detokenizer = IncrementalDetokenizer(decode)
    text = "".join(detokenizer.decode_new([0xFF]) for _ in range(1000)) + detokenizer.decode_new([], is_last=True)
    assert text == "\ufffd" * 1000
    assert sum(decoded) < 100 * 1000


# -- large prompts and replies -----------------------------------------------------------------------------------------


class LongTokenizer(ByteTokenizer):
    """Claims that some tokens are long."""

    max_token_chars = 64


class SlowRenderer(ByteRenderer):
    """Announces each call in `reached`, and waits for a permit."""

    tokenizer = LongTokenizer()

    def __init__(self) -> None:
        super().__init__()
        self.reached: queue.Queue[str] = queue.Queue()
        self.permits = threading.Semaphore(0)

    def render(self, messages, tools=(), **options):
        self._wait("render")
        return super().render([Message("user", "short")], tools, **options)

    def parse(self, sampled_ids, prompt):
        self._wait("parse")
        return super().parse(sampled_ids, prompt)

    def _wait(self, step):
        self.reached.put(step)
        assert self.permits.acquire(timeout=30)


@pytest.fixture(scope="module")
def slow_server(model):
    renderer = SlowRenderer()
    with run_server(
        build_core(model, kv_cache_tokens=8192, max_queued_requests=8, max_running_requests=8), renderer=renderer
    ) as (url, _):
        yield url, renderer


@pytest.mark.parametrize("content", ["x" * 1_000_000, [{"type": "text", "text": "x" * 1_000_000}]], ids=type)
def test_too_long_prompt_is_rejected_before_rendering(slow_server, content):
    url, renderer = slow_server
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
        "/v1/completions": {"prompt": "x" * 1_000_000},
    }
    for path, body in bodies.items():
        response = httpx.post(url + path, json=body, timeout=20)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "ContextOverflow"
        assert "at least 15625 tokens" in response.json()["error"]["message"]
    assert renderer.reached.empty()


def test_server_responds_while_a_large_chat_is_rendered_and_parsed(slow_server):
    url, renderer = slow_server
    body = {"messages": [{"role": "user", "content": "x" * 20_000}], "max_tokens": 128, "n": 8, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
        for step, permits in [("render", 1), ("parse", 8)]:
            assert renderer.reached.get(timeout=30) == step
            assert httpx.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
            renderer.permits.release(permits)
        assert len(chat.result().json()["choices"]) == 8
