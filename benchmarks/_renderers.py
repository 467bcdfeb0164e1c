"""The time of the `renderers` library for the same conversation: its generic renderer, and its hand-written Qwen3.

Run by `render.py` in an interpreter that has the library; prints one JSON object.
"""

from __future__ import annotations

import json
import time
from functools import cached_property
from typing import Any

import jinja2
import jinja2.sandbox
import renderers
from _chat import conversation, template, tokenizer


class TokenizerAdapter:
    """The part of a Hugging Face tokenizer that the library uses."""

    name_or_path = "benchmark"
    unk_token_id = None

    def __init__(self) -> None:
        self.backend = tokenizer()
        self.eos_token_id = self.backend.token_to_id("<|im_end|>")

    @cached_property
    def template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template())

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(self, messages: list[Any], *, add_generation_prompt: bool, **_: Any) -> list[int]:
        return self.encode(self.template.render(messages=messages, add_generation_prompt=add_generation_prompt))


def measure(function: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def main() -> None:
    adapter = TokenizerAdapter()
    messages: list[Any] = conversation()
    generic = renderers.create_renderer(adapter, renderers.DefaultRendererConfig())
    rendered, took = measure(lambda: generic.render(messages, add_generation_prompt=True))
    family = renderers.create_renderer(adapter, renderers.Qwen3RendererConfig(thinking_retention="all"))
    _, family_took = measure(lambda: family.render(messages, add_generation_prompt=True))
    prompt = family.render(messages[:-2], add_generation_prompt=True).token_ids
    reply: list[Any] = [*adapter.encode(messages[-2]["content"]), adapter.eos_token_id]
    _, bridge_took = measure(lambda: family.bridge_to_next_turn(prompt, reply, messages[-1:]))
    times = {"generic_s": took, "family_s": family_took, "family_bridge_s": bridge_took}
    print(json.dumps({**times, "tokens": len(rendered.token_ids)}))


if __name__ == "__main__":
    main()
