"""The SDKs of OpenAI and Anthropic and the curl examples of the docs, against a server of `tiny`."""

import contextlib
import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import ramify
from ramify.infer import Engine, EngineConfig
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.model.weights_manifest import Manifest, compute_checksum
from ramify.trace.version import PolicyVersion
from tests.support.models import DEVICE
from tests.support.native_server import run_server

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the shop.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, started in a directory with published weights, `weights/step_000020`."""
    directory, tiny = tmp_path_factory.mktemp("serve"), resolve_model_path("tiny")
    publish(directory / "weights" / "step_000020", PolicyVersion("tiny", 0, 20))
    core = Engine.load("tiny", EngineConfig(device=DEVICE, dtype="float32")).core
    with contextlib.chdir(directory), run_server(core, name="tiny", renderer=load_renderer(tiny)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)


@pytest.fixture(scope="module")
def messages_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", timeout=60, max_retries=0)


def publish(directory: Path, version: PolicyVersion) -> None:
    """Publish the model's own weights as another version, so that other tests are not affected."""
    shutil.copytree(resolve_model_path("tiny"), directory)
    weights = directory / "model.safetensors"
    Manifest(version, {weights.name: compute_checksum(weights)}).write(directory)


def chat(client: openai.OpenAI, **options):
    messages = options.pop("messages", [{"role": "user", "content": "Reverse this text: abc"}])
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 32, "seed": 1, **options})


def test_sdk_reads_samples_logprobs_and_streams(client: openai.OpenAI):
    """Each field has a test in `test_server`; here the SDK parses them all."""
    completion = chat(client, n=2, temperature=1.0, logprobs=True, top_logprobs=2)
    assert completion.usage is not None and completion.usage.completion_tokens > 0
    for choice in completion.choices:
        assert choice.message.content and choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    parts = [chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices]
    assert "".join(parts) == chat(client).choices[0].message.content


def test_tool_calls_are_parsed(client: openai.OpenAI):
    messages = [{"role": "user", "content": "Search for red shoes."}]
    completion = chat(client, messages=messages, tools=[TOOL], n=8, max_tokens=96)
    calls = [call for choice in completion.choices for call in choice.message.tool_calls or ()]
    assert calls, [choice.message.content for choice in completion.choices]
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "tool_calls": 5}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": ["search"]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}, "arguments"),
        ({"role": "assistant", "content": "x", "reasoning_content": {"a": 1}}, "messages.0.reasoning_content"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages.0.tool_call_id"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "messages.0.content.0.text"),
    ],
)
def test_invalid_message_is_rejected_by_field(client: openai.OpenAI, message: Any, field: str):
    with pytest.raises(openai.BadRequestError, match=field):
        client.chat.completions.create(model="tiny", messages=[message], max_tokens=1)


def test_unknown_model_is_404(client: openai.OpenAI, messages_client: Any):
    with pytest.raises(openai.NotFoundError, match="tiny") as info:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert info.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.responses.create(model="other", input="a")
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        messages_client.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "a"}])


def test_text_offsets_are_positions_in_the_text(client: openai.OpenAI):
    options: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "seed": 3, "logprobs": 0}
    (choice,) = client.completions.create(**options, echo=True).choices
    assert choice.logprobs is not None and choice.logprobs.tokens and choice.logprobs.text_offset
    ends = itertools.accumulate(map(len, choice.logprobs.tokens))
    assert choice.logprobs.text_offset == [0, *ends][:-1]
    streamed = [event.choices[0].logprobs for event in client.completions.create(**options, stream=True)]
    whole = client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert [offset for part in streamed if part for offset in part.text_offset or ()] == whole.text_offset


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [5]}, {"bad_words": ["a"]}, {"logits_processors": ["a"]}])
def test_fields_that_forbid_tokens_are_refused_by_name(client: openai.OpenAI, fields: dict[str, Any]):
    (name,) = fields
    with pytest.raises(openai.BadRequestError, match=name):
        chat(client, extra_body=fields)
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"use_beam_search": True})


def test_final_message_is_continued_on_request(client: openai.OpenAI, url: str):
    messages = [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": "cb"}]
    options = {"messages": messages, "extra_body": {"continue_final_message": True, "return_token_ids": True}}
    completion = chat(client, **options)
    prompt = httpx.post(f"{url}/detokenize", json={"tokens": completion.choices[0].prompt_token_ids}).json()["prompt"]
    assert prompt.endswith("cb") and not (completion.choices[0].message.content or "").startswith("cb")


def test_compressed_bodies_are_read_up_to_a_limit(url: str):
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1}).encode()
    headers = {"content-encoding": "gzip"}
    reply = httpx.post(f"{url}/v1/completions", content=gzip.compress(body), headers=headers)
    assert reply.status_code == 200 and reply.json()["choices"]
    bomb = gzip.compress(bytes(130 * 2**20), compresslevel=1)
    for content, encoding, reason in ((bomb, "gzip", "larger"), (body, "gzip", "gzip"), (body, "br", "gzip")):
        reply = httpx.post(f"{url}/v1/completions", content=content, headers={"content-encoding": encoding}, timeout=60)
        assert reply.status_code == 400 and reason in reply.json()["error"]["message"]


def test_responses_api_keeps_state(client: openai.OpenAI):
    first = client.responses.create(model="tiny", input="Reverse: abc", max_output_tokens=8)
    assert first.output_text and client.responses.retrieve(first.id) == first
    items: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Again"}]
    question: Any = {"role": "user", "content": "Reverse: abc"}
    by_items = client.responses.create(model="tiny", input=[question, *items], max_output_tokens=8)
    by_id = client.responses.create(
        model="tiny", input="Again", previous_response_id=first.id, max_output_tokens=8, stream=True
    )
    completed: Any = list(by_id)[-1]
    assert completed.type in ("response.completed", "response.incomplete")
    assert completed.response.usage is not None and by_items.usage is not None
    assert completed.response.usage.input_tokens == by_items.usage.input_tokens


def test_messages_api(messages_client: Any):
    options = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Reverse: abc"}]}
    reply = messages_client.messages.create(**options)
    assert reply.content[0].text and reply.usage.output_tokens <= 8
    count = messages_client.messages.count_tokens(model="tiny", messages=options["messages"])
    assert count.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    with messages_client.messages.stream(**options) as stream:
        assert stream.get_final_message().usage.output_tokens <= 8


# -- the curl examples of the docs -------------------------------------------------------------------------------------


def check_chat(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]


def check_generation(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    count = len(choice["token_ids"])
    assert 1 <= count <= 8 and choice["finish_reason"] in ("stop", "length", "abort")
    assert len(choice["logprobs"]["content"]) == count
    assert sum(tokens for _policy, _incarnation, _step, tokens in choice["policy_versions"]) == count


def check_models(body: str) -> None:
    (card,) = json.loads(body)["data"]
    assert card["id"] == "tiny" and card["max_model_len"] > 0
    assert set(card["version"]) == {"policy", "incarnation", "step"}


def has_fields(**fields: Any) -> Callable[[str], None]:
    def check(body: str) -> None:
        assert json.loads(body).items() >= fields.items()

    return check


def check_metrics(body: str) -> None:
    assert re.search(r"^ramify_sampled_tokens_total \d+$", body, re.MULTILINE)


def check_scored_prompt(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    assert choice["text"] == "Reverse: abc"
    assert [value is None for value in choice["logprobs"]["token_logprobs"][:2]] == [True, False]


def check_tokens(body: str) -> None:
    response = json.loads(body)
    assert response["count"] == len(response["tokens"]) > 0


CHECKS: dict[str, Callable[[str], None]] = {
    "/health": has_fields(status="ok"),
    "/v1/models": check_models,
    "/v1/models/tiny": has_fields(id="tiny"),
    "/version": has_fields(version=ramify.__version__),
    "/v1/completions": check_scored_prompt,
    "/tokenize": check_tokens,
    "/metrics": check_metrics,
    "/v1/chat/completions": check_chat,
    "/v1/messages": has_fields(type="message", role="assistant"),
    "/v1/responses": has_fields(object="response", model="tiny"),
    "/inference/v1/generate": check_generation,
    "/pause?mode=keep": has_fields(status="paused"),
    "/resume": has_fields(status="ok"),
    "/update_weights": has_fields(version={"policy": "tiny", "incarnation": 0, "step": 20}),
}


def test_curl_examples_of_the_docs(url: str, tmp_path: Path):
    """bash runs each block unchanged; curl's settings file adds a timeout and a line with the status."""
    if shutil.which("curl") is None:
        pytest.fail("curl is not on the PATH; the examples of docs/inference.md are run with it, so install it")
    (tmp_path / ".curlrc").write_text('max-time = 60\nwrite-out = "\\n>>> %{http_code} %{url_effective}\\n"\n')
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    paths = set[str]()
    for block in (block for block in blocks if re.search(r"\bcurl\b", block)):
        variables = {**os.environ, "URL": url, "CURL_HOME": str(tmp_path)}
        command = ["bash", "-euo", "pipefail", "-c", block]
        result = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        responses = re.findall(r"(.*?)\n>>> (\d+) (\S+)\n", result.stdout, re.DOTALL)
        assert len(responses) == len(re.findall(r"^curl ", block, re.MULTILINE)), result.stdout
        for body, status, address in responses:
            assert status == "200", f"{address} responded {status}: {body}"
            path = address.removeprefix(url)
            assert path in CHECKS, f"{address} is in the docs; add a check for it here"
            CHECKS[path](body)
            paths.add(path)
    assert paths == set(CHECKS)
