"""Encoding of texts and conversations. Those that cannot fit are rejected; large ones are encoded in a thread."""

from collections.abc import Sequence
from typing import Any

from ramify.core.errors import RequestInvalid, TemplateRefused
from ramify.infer.dialects.chat_format import parse_tool
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.engine import Engine
from ramify.infer.engine_core import context_overflow_error
from ramify.infer.images import ImageReference
from ramify.infer.request_bodies import ChatTool
from ramify.model.render import RenderedPrompt, Renderer
from ramify.model.render.offload import OFFLOAD_MIN_CHARS, offload
from ramify.model.render.prompt_images import check_image_count, find_image_parts


def require_renderer(renderer: Renderer | None) -> Renderer:
    """Return the renderer. Raises RequestInvalid if the server has none for its model."""
    if renderer is None:
        raise RequestInvalid("this server has no tokenizer for its model, so it takes no text; send token ids")
    return renderer


async def render_chat(
    parser: MessageParser, tools: Sequence[ChatTool] | None, engine: Engine, renderer: Renderer
) -> RenderedPrompt:
    """Return the prompt for the next assistant turn, or for the rest of it after the prefill of `parser`.

    Raises RequestInvalid, ContextOverflow or ImageInvalid.
    """
    parsed, media = parser.messages, parser.media
    if not parsed:
        raise RequestInvalid("messages: at least one is needed")
    schemas = [schema for tool in tools or () if (schema := parse_tool(tool)) is not None]
    characters = sum(len(message.text.strip()) for message in parsed)  # many templates trim the space around a text
    characters += len(parser.prefill)
    _check_length(characters, engine, renderer)
    check_image_count(len(find_image_parts(parsed)))
    if renderer.image_cache is not None:  # otherwise the renderer refuses images
        for image in media.values():
            await renderer.image_cache.process_async(image)  # in a thread; rendering needs the size of the result
    try:
        prompt = await offload(characters >= OFFLOAD_MIN_CHARS, renderer.render, parsed, schemas, media=media)
    except TemplateRefused as error:
        raise RequestInvalid(f"messages: {error.message}") from error
    except RecursionError as error:
        raise RequestInvalid("messages or tools: nested too deeply for the chat template") from error
    if not parser.prefill:
        return prompt
    return await offload(characters >= OFFLOAD_MIN_CHARS, renderer.prefill, prompt, parser.prefill)


async def load_images(prompt: RenderedPrompt, renderer: Renderer) -> tuple[ImageReference, ...]:
    """Return the processed images of a prompt that `render_chat` returned."""
    if renderer.image_cache is None:
        return ()
    cache, images = renderer.image_cache, prompt.images
    processed = [await cache.process_async(image.media) for image in images]
    return tuple(
        ImageReference(image.media.hash, image.start, image.stop, item) for image, item in zip(images, processed)
    )


async def encode_text(text: str, engine: Engine, renderer: Renderer) -> list[int]:
    """Return the token ids of a text; special tokens in it are recognized. Raises ContextOverflow."""
    _check_length(len(text), engine, renderer)
    encoded = await offload(len(text) >= OFFLOAD_MIN_CHARS, renderer.tokenizer.encode, text)
    return encoded.ids.tolist()


async def encode_prompts(prompt: Any, engine: Engine, renderer: Renderer | None) -> list[list[int]]:
    """Return the prompts of `/v1/completions` as token ids: one text or list of token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompt = [prompt]
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(await encode_text(item, engine, require_renderer(renderer)))
        elif isinstance(item, list):
            prompts.append(item)
        else:
            raise RequestInvalid("prompt: expected text, token ids, or a list of either")
    if not prompts:
        raise RequestInvalid("prompt: at least one is needed")
    return prompts


def _check_length(characters: int, engine: Engine, renderer: Renderer) -> None:
    """Raise ContextOverflow if the text is too long even if every token is the longest one.

    This is checked before rendering, because rendering such a text may take very long.
    """
    min_tokens, limit = characters // renderer.tokenizer.max_token_chars, engine.core.max_model_len
    if min_tokens >= limit:
        raise context_overflow_error(f"at least {min_tokens}", limit)
