"""`ramify rl` trains on rollouts of agents that send images with real SDKs, in each dialect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest

import ramify as rf
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from ramify.tasksets.color_codeword import (
    REQUEST,
    SYSTEM,
    ColorCodeword,
    ColorCodewordConfig,
    ColorCodewordTask,
    make_square_url,
    score_letters,
)
from tests.support.runs import read_values, run_command

MAX_TOKENS = 12
DIALECTS = ("chat", "responses", "messages")
pytestmark = [
    pytest.mark.run,
    pytest.mark.timeout(300),
    pytest.mark.full("a minute of two cores; tests/gateway has the parts"),
]

CONFIG = """
name = "run"
max_steps = 2
seq_len = 640

[model]
name = "tiny-vision"

[orchestrator]
batch_size = 12                  # one group of each dialect
group_size = 4
max_staleness = 0
"""
SOURCE = """
[[train]]
name = "DIALECT"
taskset = { id = "tests.rl.test_image_dialects:SdkSquares", dialect = "DIALECT" }
sampling = { temperature = 1.0, max_tokens = 12 }
"""


class SdkSquaresConfig(ColorCodewordConfig):
    dialect: Literal["chat", "responses", "messages"] = "chat"


class SdkSquares(rf.Taskset):
    """The agent shows the squares of all turns, and keeps the conversation as the SDK returns it."""

    config: SdkSquaresConfig
    task_type = ColorCodewordTask
    requires_vision = True

    def load(self) -> Iterator[ColorCodewordTask]:
        yield from ColorCodeword(self.config).load()

    async def run_agent(self, task: ColorCodewordTask, endpoint: rf.Endpoint) -> str:
        converse = {"chat": _use_chat, "responses": _use_responses, "messages": _use_messages}[self.config.dialect]
        await converse(endpoint, [[make_square_url(letter) for letter in letters] for letters in task.turns])
        return "done"

    @rf.reward
    def right_letters(self, task: ColorCodewordTask, trace: rf.Trace) -> float:
        return score_letters(task, trace)


async def _use_chat(endpoint: rf.Endpoint, turns: list[list[str]]) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for urls in turns:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": REQUEST}]})
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def _use_responses(endpoint: rf.Endpoint, turns: list[list[str]]) -> None:
    items: list[Any] = []
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for urls in turns:
            parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
            items.append({"role": "user", "content": [*parts, {"type": "input_text", "text": REQUEST}]})
            answer = await client.responses.create(
                model="policy", instructions=SYSTEM, input=items, max_output_tokens=MAX_TOKENS
            )
            items.append({"role": "assistant", "content": answer.output_text})


async def _use_messages(endpoint: rf.Endpoint, turns: list[list[str]]) -> None:
    messages: list[Any] = []
    async with anthropic.AsyncAnthropic(
        base_url=endpoint.base_url.removesuffix("/v1"), api_key=endpoint.api_key
    ) as client:
        for urls in turns:
            sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
            parts = [{"type": "image", "source": source} for source in sources]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": REQUEST}]})
            answer = await client.messages.create(
                model="policy", system=SYSTEM, messages=messages, max_tokens=MAX_TOKENS
            )
            messages.append({"role": "assistant", "content": "".join(block.text for block in answer.content)})


def test_images_of_every_sdk_are_trained(tmp_path):
    (tmp_path / "rl.toml").write_text(CONFIG + "".join(SOURCE.replace("DIALECT", name) for name in DIALECTS))
    result = run_command("rl", "@", str(tmp_path / "rl.toml"), "-o", str(tmp_path / "outputs"), cwd=Path.cwd())
    assert result.returncode == 0, result.stdout + result.stderr
    with RunStore.open(tmp_path / "outputs/run", write=False) as store:
        ledger = Ledger.open_readonly(store)
        trained = {group.number: group.source for group in ledger.groups() if group.step is not None}
        assert set(trained.values()) == set(DIALECTS)
        for attempt in ledger.attempts():
            if attempt.group_number in trained and attempt.rollout_id is not None:
                (trace,) = store.read_traces(attempt.rollout_id)
                (leaf,) = trace.leaves  # no turn broke the history
                assert len(trace.graph.path_media(leaf)) == 6 and len(trace.sampled_nodes) == 3
                assert all(node.is_trainable for node in trace.nodes)
    assert all(count > 0 for count in read_values(tmp_path / "outputs/run", "forest/images"))
    assert all(value < 1e-6 for value in read_values(tmp_path / "outputs/run", "mismatch_kl"))
    assert set(read_values(tmp_path / "outputs/run", "render/breaks")) == {0.0}
