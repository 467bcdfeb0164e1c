"""Images of real SDKs in three dialects become nodes of one trace; bad images are refused by name."""

import asyncio
import base64
import json
import resource
import threading
from typing import Any

import anthropic
import openai
import pytest

from ramify.infer.gateway.request_quota import QuotaSettings
from ramify.model.images import ImageCache, ImageFamily, ProcessedImage, load_image_family
from ramify.model.render import load_renderer
from ramify.model.render.prompt_images import MAX_PROMPT_IMAGES
from ramify.trace import Media, decode_trace, encode_trace
from tests.support.engine import TINY, check_tokens
from tests.support.images import (
    data_url,
    encode_image,
    make_animation,
    make_pixels,
    make_png_header,
    make_square,
    write_vision_directory,
)
from tests.support.scenario import Scenario

RED, GREEN, BLUE = (make_square(color) for color in [(255, 0, 0), (0, 255, 0), (0, 0, 255)])
SCRIPT = ["A", "AB", "ABC"]
PNG = encode_image(make_pixels(40, 30))
BAD_IMAGES = {
    "truncated png": PNG[: len(PNG) // 2],
    "bomb": make_png_header(10_000, 10_000),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'></svg>",
    "animated gif": make_animation("GIF"),
}


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return load_renderer(write_vision_directory(tmp_path_factory.mktemp("model"), "tiny"))


async def converse_with_chat(scenario: Scenario, images: list[list[Media]]) -> list[str]:
    messages: list[Any] = []
    replies: list[str] = []
    for group in images:
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in group]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]})
        answer = await scenario.openai().chat.completions.create(model="m", messages=messages)
        replies.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


async def converse_with_responses(scenario: Scenario, images: list[list[Media]]) -> list[str]:
    items: list[Any] = []
    replies: list[str] = []
    for group in images:
        parts = [{"type": "input_image", "image_url": data_url(image), "detail": "auto"} for image in group]
        items.append({"role": "user", "content": [*parts, {"type": "input_text", "text": "And now?"}]})
        answer = await scenario.openai().responses.create(model="m", input=items)
        replies.append(answer.output_text)
        items.append({"role": "assistant", "content": answer.output_text})
    return replies


async def converse_with_messages(scenario: Scenario, images: list[list[Media]]) -> list[str]:
    messages: list[Any] = []
    replies: list[str] = []
    for group in images:
        sources = [
            {"type": "base64", "media_type": image.mime, "data": base64.b64encode(image.data).decode()}
            for image in group
        ]
        parts = [{"type": "image", "source": source} for source in sources]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": "And now?"}]})
        answer: Any = await scenario.anthropic().messages.create(model="m", messages=messages, max_tokens=50)
        replies.append(answer.content[0].text)
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


@pytest.mark.parametrize("converse", [converse_with_chat, converse_with_responses, converse_with_messages])
async def test_images_of_every_dialect_become_one_trainable_trace(open_scenario, vision, converse):
    images = [[RED, GREEN], [BLUE, RED], [RED, RED]]

    async with open_scenario(list(SCRIPT), renderer=vision) as scenario:
        assert await converse(scenario, images) == SCRIPT
        trace = scenario.trace
        check_tokens(trace, scenario.engine)
        assert len(trace.leaves) == 1 and "forks" not in trace.info
        assert not [name for name in trace.metrics if name.startswith("render/breaks")]
        assert all(node.is_trainable for node in trace.nodes)
        assert {media.hash: media for media in trace.graph.media} == {image.hash: image for image in (RED, GREEN, BLUE)}
        for node in trace.nodes:
            assert len(node.media) == (2 if node.message.role == "user" else 0)
        # The engine got the images at their placeholders, each uploaded once.
        path_media = trace.graph.path_media(len(trace.nodes) - 1)
        sent = [(image["start"], image["stop"], image["hash"]) for image in scenario.engine.requests[-1]["images"]]
        assert sent == path_media and len(sent) == 6
        assert [hash for _, _, hash in sent] == [image.hash for group in images for image in group]
        uploads = [path for path in scenario.engine.targets if "/images/" in path]
        assert len(uploads) == 3 and set(scenario.engine.images) == {image.hash for image in (RED, GREEN, BLUE)}
        # A trace with images survives the wire.
        decoded = decode_trace(encode_trace(trace))
        assert decoded.graph.path_media(len(trace.nodes) - 1) == path_media


async def test_all_dialects_give_equal_tokens_for_images(open_scenario, vision):
    prompts = []
    for converse in (converse_with_chat, converse_with_responses, converse_with_messages):
        async with open_scenario(list(SCRIPT), renderer=vision) as scenario:
            await converse(scenario, [[RED, GREEN], [BLUE]])
            prompts.append([prompt for prompt, _, _ in scenario.engine.samples])
    assert prompts[0] == prompts[1] == prompts[2]


async def test_the_same_texts_with_other_images_are_another_conversation(open_scenario, vision):
    async with open_scenario(["A", "B"], renderer=vision) as scenario:
        await converse_with_chat(scenario, [[RED]])
        await converse_with_chat(scenario, [[BLUE]])
        trace = scenario.trace
        assert len(trace.leaves) == 2
        first, second = (trace.graph.path_media(leaf) for leaf in trace.leaves)
        assert {first[0][2], second[0][2]} == {RED.hash, BLUE.hash}
        assert scenario.engine.samples[0][0] == scenario.engine.samples[1][0]  # equal tokens


async def test_images_of_tool_results_reach_the_model(open_scenario, vision):
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "seen: "}, image]},
    ]

    async with open_scenario(["red"], renderer=vision) as scenario:
        assert (await scenario.post("/chat/completions", {"messages": messages})).status_code == 200
        assert [image["hash"] for image in scenario.engine.requests[0]["images"]] == [RED.hash]


async def test_a_model_of_an_unsupported_vision_family_reads_descriptions_of_tool_images(open_scenario, tmp_path):
    directory = write_vision_directory(tmp_path, "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    num_images = MAX_PROMPT_IMAGES + 1  # the limit is for images that the model sees
    images = [{"type": "image_url", "image_url": {"url": data_url(make_square((n, 0, 0)))}} for n in range(num_images)]
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": images},
    ]

    async with open_scenario(["red"], renderer=load_renderer(directory)) as scenario:
        answer = await scenario.post("/chat/completions", {"messages": messages})
        assert answer.status_code == 200, answer.text
        assert scenario.trace.nodes[2].message.text.count("100 x 100 pixels") == num_images
        assert not scenario.trace.graph.media
        user_message = {"role": "user", "content": images[:1]}
        answer = await scenario.post("/chat/completions", {"messages": [user_message]})
        assert answer.json()["error"]["type"] == "ModelUnsupported" and "gemma3" in answer.text


# -- bad input --------------------------------------------------------------------------------------------------------


def bad_contents() -> dict[str, list[dict[str, Any]]]:
    urls = {name: f"data:image/png;base64,{base64.b64encode(data).decode()}" for name, data in BAD_IMAGES.items()}
    urls["wrong base64"] = "data:image/png;base64,%%%"
    urls["not base64"] = "data:image/svg+xml,<svg/>"
    urls["an address"] = "https://example.com/cat.png"
    urls["a file"] = "file:///etc/passwd"
    contents = {name: [{"type": "image_url", "image_url": {"url": url}}] for name, url in urls.items()}
    many = [make_square((index, 0, 0), side=4) for index in range(50)]
    contents["50 images"] = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in many]
    contents["50 times the same"] = [{"type": "image_url", "image_url": {"url": data_url(RED)}}] * 50
    return contents


BAD_CONTENTS = bad_contents()


@pytest.mark.parametrize("name", BAD_CONTENTS)
async def test_a_bad_image_is_refused_by_name_and_the_session_lives(open_scenario, vision, name):
    async with open_scenario(["A"], renderer=vision) as scenario:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        messages = [{"role": "user", "content": BAD_CONTENTS[name]}]
        answer = await scenario.post("/chat/completions", {"messages": messages})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "ImageInvalid", answer.text
        assert "root:" not in answer.text
        (refusal,) = scenario.trace.info["refusals"]
        assert refusal["name"] == "ImageInvalid" and refusal["status"] == 400
        assert len(scenario.trace.nodes) == 0 and not scenario.engine.requests
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
        assert await converse_with_chat(scenario, [[RED]]) == ["A"]


async def test_sdks_raise_their_own_error_for_a_bad_image(open_scenario, vision):
    bad = Media.from_bytes(BAD_IMAGES["svg"], "image/png")

    async with open_scenario([], renderer=vision) as scenario:
        with pytest.raises(openai.BadRequestError, match="format 'svg'"):
            await converse_with_chat(scenario, [[bad]])
        with pytest.raises(openai.BadRequestError, match="format 'svg'"):
            await converse_with_responses(scenario, [[bad]])
        with pytest.raises(anthropic.BadRequestError, match=r"ImageInvalid: image: .*format 'svg'"):
            await converse_with_messages(scenario, [[bad]])


@pytest.mark.parametrize("path", ["square.png", "/data/square.png", "./a b.png", "C:\\square.png"])
async def test_a_path_as_image_is_refused_with_what_is_expected(open_scenario, vision, path):
    chat_part = {"type": "image_url", "image_url": {"url": path}}
    block = {"type": "image", "source": {"type": "url", "url": path}}

    async with open_scenario([], renderer=vision) as scenario:
        for route, part in (("/chat/completions", chat_part), ("/messages", block)):
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 50}
            answer = await scenario.post(route, body)
            message = answer.json()["error"]["message"]
            expected = "image: expected a data URL such as data:image/png;base64,iVBORw0KGgo..., found"
            assert answer.status_code == 400 and f"{expected} {path!r}, which is not a URL" in message
            assert "; read the file and send its bytes in base64" in message
        assert {refusal["name"] for refusal in scenario.trace.info["refusals"]} == {"ImageInvalid"}


async def test_an_image_for_a_text_model_is_refused(open_scenario):
    async with open_scenario([], renderer=TINY) as scenario:
        with pytest.raises(openai.BadRequestError, match="is a text model"):
            await converse_with_chat(scenario, [[RED]])
        assert scenario.trace.info["refusals"][0]["name"] == "ImageInvalid"


class SlowFamily:
    """An image family whose `process` waits for `gate` if the image is `slow`."""

    def __init__(self, family: ImageFamily, slow: Media) -> None:
        self._family, self._slow = family, slow
        self.gate, self.started = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def process(self, media: Media) -> ProcessedImage:
        if media.hash == self._slow.hash:
            self.started.set()
            assert self.gate.wait(60)
        return self._family.process(media)


@pytest.fixture
def slow_vision(tmp_path):
    """A renderer that is slow to process BLUE, and keeps the arrays of one image only; and its family."""
    renderer = load_renderer(write_vision_directory(tmp_path, "tiny"))
    image_family = load_image_family(tmp_path)
    assert image_family is not None
    family: Any = SlowFamily(image_family, slow=BLUE)
    renderer.image_cache = ImageCache(family, max_bytes=1)
    yield renderer, family
    family.gate.set()


async def test_a_call_does_not_wait_for_the_images_of_others(open_scenario, slow_vision):
    renderer, family = slow_vision

    async with open_scenario([*SCRIPT, "D"], renderer=renderer) as scenario:
        await converse_with_chat(scenario, [[RED]])
        await converse_with_chat(scenario, [[GREEN]])  # drops the arrays of RED
        blue = asyncio.create_task(converse_with_chat(scenario, [[BLUE]]))
        assert await asyncio.to_thread(family.started.wait, 60)
        assert await converse_with_chat(scenario, [[RED]]) == ["ABC"]  # its layout is known, the engine has the arrays
        assert not blue.done()
        family.gate.set()
        assert await blue == ["D"]


async def test_processing_an_image_has_a_deadline(open_scenario, slow_vision):
    renderer, _ = slow_vision

    async with open_scenario([], renderer=renderer, call_timeout=0.2) as scenario:
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(BLUE)}}]}]
        answer = await scenario.post("/chat/completions", {"messages": messages})
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "DeadlineExceeded", answer.text
        assert not scenario.engine.requests


async def test_the_images_of_a_rollout_are_bounded(open_scenario, vision):
    padding = bytes(10_000)  # after the end of a PNG, where decoders do not look
    images = [Media.from_bytes(make_square((index, 0, 0), side=4).data + padding, "image/png") for index in range(4)]

    async with open_scenario(list(SCRIPT), renderer=vision, quota=QuotaSettings(max_image_bytes=40_000)) as scenario:
        assert await converse_with_chat(scenario, [images[:3]]) == SCRIPT[:1]
        with pytest.raises(openai.BadRequestError, match="a rollout may have"):
            await converse_with_chat(scenario, [[images[3]]])


async def test_counting_tokens_counts_the_placeholders_of_images(open_scenario, vision, tmp_path):
    family = load_image_family(write_vision_directory(tmp_path, "tiny"))
    assert family is not None
    num_image_tokens = family.process(RED).num_tokens + 3  # and the tokens around them

    async with open_scenario([], renderer=vision) as scenario:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED.data).decode()}
        counts = []
        for parts in ([], [{"type": "image", "source": source}]):
            content = [{"type": "text", "text": "hi"}, *parts]
            answer = await scenario.anthropic().messages.count_tokens(
                model="m", messages=[{"role": "user", "content": content}]
            )
            counts.append(answer.input_tokens)
        assert counts[1] - counts[0] == num_image_tokens
