"""The native server for people: OpenAI's shape, clear refusals, and nothing left behind by clients that go away."""

import asyncio
import contextlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from ramify.infer.detokenizer import IncrementalDetokenizer
from ramify.model.version import PolicyVersion
from tests.infer.llama import build_core, publish_as, write_llama
from tests.infer.serving import ByteRenderer, served


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    source = write_llama(home / "source", seed=3, positions=1024)
    return publish_as(home / "v1", source, PolicyVersion("llama", 0, 1))


@pytest.fixture(scope="module")
def server(home):
    with served(build_core(home, kv_tokens=8192, queue=8, max_running=4)) as (url, engine):
        yield url, engine


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server[0], timeout=30) as client:
        yield client


def text(http, prompt: str | list[int] | list[str] = "hello", **fields):
    response = http.post("/v1/completions", json={"prompt": prompt, "seed": 1, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(http, path, **fields):
    with http.stream("POST", path, json={"stream": True, "ignore_eos": True, "seed": 1, **fields}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [msgspec.json.decode(line) for line in lines]


def test_a_completion_is_text_with_usage(http):
    answer = text(http, max_tokens=12)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 12


def test_it_tells_which_operators_are_in_use(http, server):
    """And why they are not the compiled ones, where they are not."""
    (card,) = http.get("/v1/models").json()["data"]
    compiled = server[1].core.runner.compiled is not None
    assert (card["operators"] == "compiled") == compiled
    assert compiled or card["operators"].startswith("torch (")
    assert f"ramify_compiled_operators {compiled:d}" in http.get("/metrics").text


def test_text_and_its_token_ids_are_the_same_prompt(http):
    assert text(http, "hello")["choices"] == text(http, ByteRenderer().encode("hello"))["choices"]


def test_several_prompts_and_samples_come_in_order(http):
    answer = text(http, ["one", "two"], n=3, max_tokens=20)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert answer["choices"][:3] == text(http, "one", n=3, max_tokens=20)["choices"]


def test_a_stream_adds_up_to_the_whole(http):
    whole = text(http, max_tokens=30, logprobs=2)
    parts = events(http, "/v1/completions", prompt="hello", max_tokens=30, logprobs=2)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    streamed = [value for part in parts for value in part["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(whole["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_text_before_it_and_frees_the_engine(http, server, stream):
    free = text(http, max_tokens=400)["choices"][0]["text"]
    stop = free[20:23]
    if stream:
        parts = events(http, "/v1/completions", prompt="hello", max_tokens=400, stop=stop)
        found, finish = "".join(part["choices"][0]["text"] for part in parts), parts[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = text(http, max_tokens=400, stop=[stop, "never there"])["choices"]
        found, finish = choice["text"], choice["finish_reason"]
    assert found == free[: free.index(stop)]
    assert finish == "stop"


def test_chat_renders_messages_and_stops_at_the_end_of_turn(http):
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 4}
    (choice,) = http.post("/v1/chat/completions", json={**fields, "logprobs": True, "top_logprobs": 2}).json()[
        "choices"
    ]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    parts = events(http, "/v1/chat/completions", **{**fields, "stream_options": {"include_usage": True}})
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
        ("/v1/chat/completions", {"messages": [{"content": "x"}], "max_completion_tokens": 0}, 400, "max_tokens"),
        ("/inference/v1/generate", {"token_ids": []}, 400, "empty"),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"stop": "x"}}, 400, "stop_token_ids"),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"logprobs": -1}}, 400, "top_logprobs"),
        ("/update_weights", {"path": "nowhere"}, 409, "manifest.json"),
        ("/update_weights", {"path": "nowhere", "kv": "burn"}, 400, "kv"),
        ("/pause", {"mode": "forever"}, 400, "mode"),
        ("/nothing", {}, 404, ""),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(http, path, body, status, message):
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    response = http.post(path, content=content)
    assert response.status_code == status
    assert message in response.text


PAGES = [
    {"Origin": "http://page.example"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "null"},
    {"Host": "page.example:8000"},
    {"Host": "page.example:8000", "Origin": "http://page.example:8000"},
    {"Host": "localhost.page.example"},
    {"Host": "127.0.0.1.page.example:8000"},
]
PROGRAMS = [
    {},
    {"Host": "localhost:8000"},
    {"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000"},
    {"Host": "node-3:8000"},
    {"Host": "10.1.2.3:8000"},
    {"Host": "[::1]:8000"},
    {"Host": socket.gethostname()},
    {"Host": "engine.lab.example:8000"},
]


@pytest.mark.parametrize("headers", PAGES, ids=str)
def test_a_web_page_cannot_control_the_engine(http, server, home, headers):
    swaps = server[1].core.counters.swaps
    for path, body in {"/pause": {}, "/pause/": {}, "/resume": {}, "/update_weights": {"path": str(home)}}.items():
        response = http.post(path, json=body, headers=headers, follow_redirects=True)
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "OriginRefused"
    assert (server[1].paused, server[1].core.counters.swaps) == (False, swaps)


@pytest.mark.parametrize("headers", PROGRAMS, ids=str)
def test_programs_control_the_engine_under_every_name_that_is_configured(http, headers):
    assert http.post("/pause", headers=headers).json() == {"status": "paused"}
    assert http.post("/resume", headers=headers).json() == {"status": "ok"}


def test_a_full_queue_answers_503_and_nothing_is_left_behind(server):
    url, engine = server

    async def main():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await engine_pause(client)
            body = {"token_ids": [5], "sampling_params": {"max_tokens": 3}}
            asks = [asyncio.ensure_future(client.post("/inference/v1/generate", json=body)) for _ in range(12)]
            done, _ = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            assert {ask.result().status_code for ask in done} == {503}
            assert done.pop().result().headers["retry-after"] == "1"
            await client.post("/resume")
            statuses = sorted([(await ask).status_code for ask in asks])
            assert statuses == [200] * 8 + [503] * 4

    async def engine_pause(client):
        (await client.post("/pause")).raise_for_status()

    asyncio.run(main())
    assert engine.core.pool.free == engine.core.pool.capacity


def test_pause_with_abort_ends_requests_in_flight(server):
    url, _ = server

    async def main():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"token_ids": [5], "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "stream": True}
            async with client.stream("POST", "/inference/v1/generate", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                await client.post("/pause", params={"mode": "abort"})
                rest = [line async for line in lines if line.startswith("data: {")]
            await client.post("/resume")
            assert msgspec.json.decode(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_a_deadline_that_passes_in_a_stream_has_its_status_there(http, server, path):
    fields = {"max_tokens": 900, "ignore_eos": True}
    body = {"token_ids": [5], "sampling_params": fields, "prompt": [5], **fields, "stream": True}
    with http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        http.post("/pause")  # so that it does not finish before
        for request in server[1].core.everyone():
            request.deadline = 0.0
        *_, said, end = (line.removeprefix("data: ") for line in lines if line)
        http.post("/resume")
    assert end == "[DONE]"
    error = msgspec.json.decode(said)["error"]
    assert (error["type"], error["code"]) == ("DeadlineExceeded", 504)


@pytest.fixture
def breaking(home):
    """The address of a server in a process of its own, and what makes its engine fail."""
    command = [sys.executable, "-m", "tests.infer.breaking", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        said = next(line for line in process.stdout if line.startswith("serving"))
        yield re.search(r"http://\S+", said)[0], lambda: process.send_signal(signal.SIGUSR1)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_stream_whose_engine_fails_says_so_by_name_as_an_answer_would(breaking):
    url, fail = breaking
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
        assert all("choices" in next(each) for each in lines)
        fail()
        rest = [[line.removeprefix("data: ") for line in each if line] for each in lines]
        answers = [http.post(path, json=body) for path, body in bodies.items()]
    for (*_, said, end), answer in zip(rest, answers, strict=True):
        assert end == "[DONE]"
        assert msgspec.json.decode(said) == answer.json()
        assert answer.status_code == answer.json()["error"]["code"] == 500
        assert answer.json()["error"]["type"] == "ProviderError"
        assert "the device is gone" in answer.json()["error"]["message"]


def test_text_streams_hold_back_what_is_not_certain():
    spoken = IncrementalDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"), ["STOP"])
    said = [spoken.decode_new([byte]) for byte in "é STOPPED".encode()]
    assert said == ["", "é", " ", "", "", "", "", "", "", ""]
    assert spoken.text == "é " and spoken.stopped
    open_end = IncrementalDetokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"), ["STOP"])
    assert (
        open_end.decode_new(b"a ST") + open_end.decode_new(b"X") + open_end.decode_new(b"S", is_last=True) == "a STXS"
    )


def test_a_text_stream_decodes_a_bounded_number_of_tokens_per_part():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return bytes(ids).decode("utf-8", "replace")

    stream = IncrementalDetokenizer(decode)
    text = "".join(stream.decode_new([0xFF]) for _ in range(1000)) + stream.decode_new([], is_last=True)
    assert text == "\ufffd" * 1000
    assert sum(decoded) < 100 * 1000


# -- large prompts and replies -----------------------------------------------------------------------------------------


class SlowRenderer(ByteRenderer):
    """Says in `reached` what it is about to do, and does it when it has a permit."""

    longest_token = 64

    def __init__(self) -> None:
        self.reached: queue.Queue[str] = queue.Queue()
        self.permits = threading.Semaphore(0)

    def render(self, messages, tools):
        self._wait("render")
        return super().render([{"content": "short"}], tools)

    def parse(self, ids, prompt):
        self._wait("parse")
        return super().parse(ids, prompt)

    def _wait(self, step):
        self.reached.put(step)
        assert self.permits.acquire(timeout=30)


@pytest.fixture(scope="module")
def slow(home):
    renderer = SlowRenderer()
    with served(build_core(home, kv_tokens=8192, queue=8, max_running=8), renderer=renderer) as (url, _):
        yield url, renderer


@pytest.mark.parametrize("content", ["x" * 10_000_000, [{"type": "text", "text": "x" * 10_000_000}]], ids=type)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_rendered(slow, content):
    url, renderer = slow
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
        "/v1/completions": {"prompt": "x" * 10_000_000},
    }
    for path, body in bodies.items():
        response = httpx.post(url + path, json=body, timeout=20)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "ContextOverflow"
        assert "at least 156250 tokens" in response.json()["error"]["message"]
    assert renderer.reached.empty()


def test_the_server_answers_while_a_large_prompt_is_rendered_and_a_large_reply_is_parsed(slow):
    url, renderer = slow
    body = {"messages": [{"role": "user", "content": "x" * 20_000}], "max_tokens": 128, "n": 8, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
        for step, permits in [("render", 1), ("parse", 8)]:
            assert renderer.reached.get(timeout=30) == step
            assert httpx.get(f"{url}/health", timeout=10).json() == {"status": "ok"}
            renderer.permits.release(permits)
        assert len(chat.result().json()["choices"]) == 8
