"""Encoding of texts and conversations. Those that cannot fit are rejected; large ones are encoded in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import RequestInvalid
from ramify.infer.chat_renderer import ChatPrompt, ChatRenderer
from ramify.infer.engine import Engine
from ramify.infer.engine_core import context_overflow_error
from ramify.render.offload import OFFLOAD_MIN_CHARS, offload


async def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    engine: Engine,
    renderer: ChatRenderer,
) -> ChatPrompt:
    """Return the prompt for the next assistant turn. Raises RequestInvalid or ContextOverflow."""
    if not messages:
        raise RequestInvalid("messages: at least one is needed")
    characters = _count_characters(messages)
    _check_length(characters, engine, renderer)
    return await offload(characters >= OFFLOAD_MIN_CHARS, renderer.render, messages, tools)


async def encode_text(text: str, engine: Engine, renderer: ChatRenderer) -> list[int]:
    """Return the token ids of a text. Raises ContextOverflow."""
    _check_length(len(text), engine, renderer)
    return await offload(len(text) >= OFFLOAD_MIN_CHARS, renderer.encode, text)


async def encode_prompts(prompt: Any, engine: Engine, renderer: ChatRenderer | None) -> list[list[int]]:
    """Return the prompts of `/v1/completions` as token ids: one text or list of token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompt = [prompt]
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, str):
            if renderer is None:
                raise RequestInvalid("prompt: this server has no tokenizer for its model; send token ids instead")
            prompts.append(await encode_text(item, engine, renderer))
        elif isinstance(item, list):
            prompts.append(item)
        else:
            raise RequestInvalid("prompt: expected text, token ids, or a list of either")
    if not prompts:
        raise RequestInvalid("prompt: at least one is needed")
    return prompts


def _count_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the characters of all messages, without the space around each text, which many templates trim."""
    contents = [message.get("content") for message in messages]
    texts = [content for content in contents if isinstance(content, str)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return sum(len(text.strip()) for text in texts)


def _check_length(characters: int, engine: Engine, renderer: ChatRenderer) -> None:
    """Raise ContextOverflow if the text is too long even if every token is the longest one.

    This is checked before rendering, because rendering such a text may take very long.
    """
    min_tokens, limit = characters // renderer.max_token_chars, engine.core.max_model_len
    if min_tokens >= limit:
        raise context_overflow_error(f"at least {min_tokens}", limit)
