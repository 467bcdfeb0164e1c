"""color-codeword played by agents that use a real SDK: each shows the squares in the format of its dialect."""

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai

import ramify as rf
from ramify.tasksets.color_codeword import (
    REQUEST,
    SYSTEM,
    ColorCodeword,
    ColorCodewordConfig,
    ColorCodewordTask,
    make_square_url,
    score_letters,
)

MAX_TOKENS = 12


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
