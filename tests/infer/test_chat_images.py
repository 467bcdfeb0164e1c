"""The server's own chat endpoint takes images, and the client uploads those that a server lacks."""

import asyncio
import json
from copy import deepcopy
from functools import partial
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from ramify.infer.client import ClientSampling, InferenceClient
from ramify.infer.client.generate_messages import RequestImage
from ramify.infer.dialects.media import media_to_url
from ramify.model.render import load_renderer
from ramify.trace import MediaPart, Message, TextPart
from tests.support.images import make_square, write_vision_directory
from tests.support.models import VISION_CONFIGS, build_core
from tests.support.native_server import run_server

pytestmark = pytest.mark.process

RED, BLUE = make_square((255, 0, 0)), make_square((0, 0, 255))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a random vision model with a tokenizer, its core and its renderer."""
    directory = write_vision_directory(tmp_path_factory.mktemp("model"), "tiny")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    config = deepcopy(VISION_CONFIGS["idefics3"])
    config.text_config.vocab_size = tokenizer.get_vocab_size()
    config.image_token_id = json.loads(files["config.json"])["image_token_id"]
    config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    renderer = load_renderer(directory)
    core = build_core(directory, kv_cache_tokens=2048, max_num_batched_tokens=256)
    with run_server(core, renderer=renderer) as (url, _):
        yield url, core, renderer


def chat(url: str, *images, **options):
    parts = [{"type": "image_url", "image_url": {"url": media_to_url(image)}} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        return create(model="llama", messages=messages, temperature=0, max_tokens=6, **options)


async def test_the_chat_endpoint_samples_what_the_generate_endpoint_samples(served):
    url, _, renderer = served
    media = {image.hash: image for image in (RED, BLUE)}
    answer = await asyncio.to_thread(chat, url, RED, BLUE, extra_body={"return_token_ids": True})
    parts = (MediaPart(RED.hash), MediaPart(BLUE.hash), TextPart("What?"))
    prompt = renderer.render([Message("user", parts)], media=media)
    assert answer.usage.prompt_tokens == len(prompt.token_ids)
    images = [
        RequestImage(
            image.media.hash,
            image.start,
            image.stop,
            partial(renderer.image_cache.process_async, media[image.media.hash]),
        )
        for image in prompt.images
    ]
    sampling = ClientSampling(temperature=0, max_tokens=6, stop_ids=renderer.stop_ids)
    async with asyncio.timeout(60), InferenceClient(url) as client:
        sample = await client.generate(prompt.token_ids.tolist(), sampling, images=images)
    assert sample.token_ids.tolist() == answer.choices[0].token_ids


def test_the_chat_endpoint_needs_no_room_in_the_cache_of_uploaded_images(served, monkeypatch):
    url, core, _ = served
    monkeypatch.setattr(core.uploaded_images, "_max_bytes", 1)
    assert chat(url, make_square((9, 9, 9)), BLUE).usage.prompt_tokens > 0


async def test_the_client_uploads_the_images_that_a_server_lacks(served):
    url, _, renderer = served
    green = make_square((0, 255, 0))
    prompt = renderer.render([Message("user", (MediaPart(green.hash),))], media={green.hash: green})
    loads = []

    async def load():
        loads.append(green.hash)
        return await renderer.image_cache.process_async(green)

    (image,) = prompt.images
    request = [RequestImage(green.hash, image.start, image.stop, load)]
    async with asyncio.timeout(60), InferenceClient(url) as client:
        for _ in range(2):
            await client.generate(prompt.token_ids.tolist(), ClientSampling(max_tokens=2), images=request)
    assert loads == [green.hash]  # uploaded for the first request, known at the second


def test_a_bad_image_is_refused_and_the_server_lives(served):
    url, _, _ = served
    bad = make_square((1, 2, 3))
    truncated = type(bad).from_bytes(bad.data[:60], bad.mime)
    with pytest.raises(openai.BadRequestError, match="damaged or incomplete png"):
        chat(url, truncated)
    with pytest.raises(openai.BadRequestError, match="50 images in one prompt"):
        chat(url, *[RED] * 50)
    assert chat(url, RED).choices[0].finish_reason in ("stop", "length")
