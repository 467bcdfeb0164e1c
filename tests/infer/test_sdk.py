"""People's clients against `ramify serve -m tiny`, as a user starts it: the openai SDK, and nothing mocked."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "ramify", "serve", "-m", "tiny", "--server.port", "0", "--inference.threads", "1"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield openai.OpenAI(base_url=f"{_address(process, log)}/v1", api_key="none", timeout=60, max_retries=0)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text()


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
    whole = ask(client).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    assert len(parts) > 1


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
    messages = [{"role": "user", "content": "Look up the word apple."}]
    answers = ask(client, messages=messages, tools=[TOOL], n=16, max_tokens=96)
    calls = [call for choice in answers.choices for call in choice.message.tool_calls or ()]
    assert calls, [choice.message.content for choice in answers.choices]
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_completions_continue_a_text(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3, logprobs=1)
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None and answer.usage.completion_tokens <= 8


def test_a_prompt_over_the_limit_is_refused_naming_both_lengths(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"\d{4,}.*\d{3,}"):
        ask(client, messages=[{"role": "user", "content": "a" * 9000}])
