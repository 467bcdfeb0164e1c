"""People's clients against `ramify serve -m tiny`, as a user starts it: the openai SDK and curl, and nothing mocked."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import ramify
from ramify.model.manifest import Manifest, compute_checksum
from ramify.model.resolve import resolve_model_path
from ramify.model.version import PolicyVersion

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
    """The server, started where a trainer has published `weights/step_000020`."""
    home = tmp_path_factory.mktemp("serve")
    publish(home / "weights" / "step_000020", PolicyVersion("tiny", 0, 20))
    log = home / "log"
    command = [sys.executable, "-m", "ramify", "serve", "-m", "tiny", "--server.port", "0", "--inference.threads", "1"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=home)
    try:
        yield _address(process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)


def publish(directory: Path, version: PolicyVersion) -> None:
    """The model's own weights under another name: what else is asked of the server stays the same."""
    shutil.copytree(resolve_model_path("tiny"), directory)
    weights = directory / "model.safetensors"
    Manifest(version, {weights.name: compute_checksum(weights)}).write(directory)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"at (http://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")


def ask(client: openai.OpenAI, **options):
    messages = options.pop("messages", [{"role": "user", "content": "Reverse this text: abc"}])
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 32, "seed": 1, **options})


def test_the_model_is_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI):
    answer = ask(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_a_streamed_answer_is_the_same_text_in_parts(client: openai.OpenAI):
    def streamed(**options) -> list[str]:
        return [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True, **options) if chunk.choices]

    assert "".join(streamed()) == ask(client).choices[0].message.content
    assert len(streamed(max_tokens=1000, extra_body={"ignore_eos": True})) > 1  # a short one may be done at once


def test_seeds_repeat_and_n_gives_different_samples(client: openai.OpenAI):
    assert ask(client, seed=5).choices[0].message.content == ask(client, seed=5).choices[0].message.content
    several = ask(client, n=4, seed=5, temperature=1.0)
    assert len({choice.message.content for choice in several.choices}) > 1


def test_logprobs_come_with_each_token(client: openai.OpenAI):
    choice = ask(client, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI):
    whole = ask(client).choices[0].message.content or ""
    stop = whole[2:4]
    choice = ask(client, stop=[stop]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_tools_are_shown_to_the_model_and_its_calls_are_parsed(client: openai.OpenAI):
    messages = [{"role": "user", "content": "Search for red shoes."}]
    answers = ask(client, messages=messages, tools=[TOOL], n=16, max_tokens=96)
    calls = [call for choice in answers.choices for call in choice.message.tool_calls or ()]
    assert calls, [choice.message.content for choice in answers.choices]
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_completions_continue_a_text(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3, logprobs=1)
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None and answer.usage.completion_tokens <= 8


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "assistant", "tool_calls": 5}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": ["search"]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}, "arguments"),
        ({"role": "assistant", "content": "x", "reasoning_content": {"a": 1}}, "messages.0.reasoning_content"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages.0.tool_call_id"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "messages.0.content.text"),
    ],
)
def test_a_message_of_another_form_is_refused_by_the_name_of_its_field(client: openai.OpenAI, message: Any, named: str):
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(model="tiny", messages=[message], max_tokens=1)


def test_a_prompt_over_the_limit_is_refused_naming_both_lengths(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"\d{4,}.*\d{3,}"):
        ask(client, messages=[{"role": "user", "content": "a" * 9000}])


# -- the curl examples of the docs -------------------------------------------------------------------------------------


def looks_like_a_chat(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]


def looks_like_a_generation(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    count = len(choice["token_ids"])
    assert 1 <= count <= 8 and choice["finish_reason"] in ("stop", "length", "abort")
    assert len(choice["logprobs"]["content"]) == count
    assert sum(tokens for _policy, _incarnation, _step, tokens in choice["policy_versions"]) == count


def looks_like_models(body: str) -> None:
    (card,) = json.loads(body)["data"]
    assert card["id"] == "tiny" and card["max_model_len"] > 0
    assert set(card["version"]) == {"policy", "incarnation", "step"}


def says(**fields: Any) -> Callable[[str], None]:
    def check(body: str) -> None:
        assert json.loads(body).items() >= fields.items()

    return check


def looks_like_metrics(body: str) -> None:
    assert re.search(r"^ramify_sampled_tokens_total \d+$", body, re.MULTILINE)


def looks_like_a_scored_prompt(body: str) -> None:
    (choice,) = json.loads(body)["choices"]
    assert choice["text"] == "Reverse: abc"
    assert [value is None for value in choice["logprobs"]["token_logprobs"][:2]] == [True, False]


def looks_like_tokens(body: str) -> None:
    answer = json.loads(body)
    assert answer["count"] == len(answer["tokens"]) > 0


ANSWERS: dict[str, Callable[[str], None]] = {
    "/health": says(status="ok"),
    "/v1/models": looks_like_models,
    "/v1/models/tiny": says(id="tiny"),
    "/version": says(version=ramify.__version__),
    "/v1/completions": looks_like_a_scored_prompt,
    "/tokenize": looks_like_tokens,
    "/metrics": looks_like_metrics,
    "/v1/chat/completions": looks_like_a_chat,
    "/inference/v1/generate": looks_like_a_generation,
    "/pause?mode=keep": says(status="paused"),
    "/resume": says(status="ok"),
    "/update_weights": says(version={"policy": "tiny", "incarnation": 0, "step": 20}),
}


def test_the_curl_examples_of_the_docs_work_as_they_are_written(url: str, tmp_path: Path):
    """Each block is run by bash; only curl's own settings file adds a deadline and a line with the status."""
    if shutil.which("curl") is None:
        pytest.fail("curl is not on the PATH; the examples of docs/inference.md are run with it, so install it")
    (tmp_path / ".curlrc").write_text('max-time = 60\nwrite-out = "\\n>>> %{http_code} %{url_effective}\\n"\n')
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    seen = set[str]()
    for block in (block for block in blocks if re.search(r"\bcurl\b", block)):
        variables = {**os.environ, "URL": url, "CURL_HOME": str(tmp_path)}
        command = ["bash", "-euo", "pipefail", "-c", block]
        ran = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        answers = re.findall(r"(.*?)\n>>> (\d+) (\S+)\n", ran.stdout, re.DOTALL)
        assert len(answers) == len(re.findall(r"^curl ", block, re.MULTILINE)), ran.stdout
        for body, status, address in answers:
            assert status == "200", f"{address} answered {status}: {body}"
            path = address.removeprefix(url)
            assert path in ANSWERS, f"{address} is in the docs; say here what it answers"
            ANSWERS[path](body)
            seen.add(path)
    assert seen == set(ANSWERS)
