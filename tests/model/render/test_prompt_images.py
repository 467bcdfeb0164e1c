"""Images in prompts: the same tokens as transformers' processors, exact spans, and no breaks between turns."""

import numpy as np
import pytest

from ramify.core.errors import ConfigInvalid, ImageInvalid, TemplateRefused
from ramify.infer.dialects.media import media_to_url
from ramify.model.render import ParsedReply, load_renderer
from ramify.model.render.prompt_images import find_image_parts
from ramify.trace import MediaPart, Message, ModelCall, TextPart, ToolCall, Trace, TraceBuilder, Turn
from tests.support.images import TEMPLATES, TINY, make_media, make_square, write_vision_directory

WIDE, TALL = make_media(90, 40, seed=1), make_media(30, 80, seed=2)
RED, BLUE = make_square((255, 0, 0)), make_square((0, 0, 255))
MEDIA = {media.hash: media for media in (WIDE, TALL, RED, BLUE)}


def part(media) -> MediaPart:
    return MediaPart(media.hash)


CONVERSATIONS = {
    "text, image": [Message("user", (TextPart("What is this?"), part(WIDE)))],
    "image, text": [Message("user", (part(TALL), TextPart("What is this?")))],
    "only images": [Message("user", (part(RED), part(BLUE)))],
    "between texts": [Message("user", (TextPart("First "), part(RED), TextPart(" then "), part(WIDE), TextPart("!")))],
    "several turns": [
        Message("user", (part(RED), TextPart("a"))),
        Message("assistant", "A"),
        Message("user", (part(RED), part(TALL), TextPart("b"))),
        Message("assistant", "B"),
        Message("user", "no image"),
    ],
}


@pytest.fixture(scope="module", params=TEMPLATES)
def renderer(request, tmp_path_factory):
    return load_renderer(write_vision_directory(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    return write_vision_directory(tmp_path_factory.mktemp("model"), "smolvlm")


def render_with_idefics3(model_dir, messages) -> list[int]:
    from transformers import PreTrainedTokenizerFast
    from transformers.image_utils import load_image
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
    image_processor = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(image_processor, tokenizer, image_seq_len=4, chat_template=TEMPLATES["smolvlm"])
    parts = [
        {
            "role": message.role,
            "content": [{"type": "text", "text": message.content}]
            if isinstance(message.content, str)
            else [
                {"type": "text", "text": item.text} if isinstance(item, TextPart) else {"type": "image"}
                for item in message.content
            ],
        }
        for message in messages
    ]
    text = processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=False)
    images = [load_image(media_to_url(MEDIA[image.hash])) for image in find_image_parts(messages)]
    return processor(images=[images], text=[text], add_special_tokens=False)["input_ids"][0]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_tokens_are_those_of_the_library(smolvlm, name):
    prompt = load_renderer(smolvlm).render(CONVERSATIONS[name], media=MEDIA)
    assert prompt.token_ids.tolist() == render_with_idefics3(smolvlm, CONVERSATIONS[name])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_image_has_its_own_placeholder_tokens(renderer, name):
    messages = CONVERSATIONS[name]
    prompt = renderer.render(messages, media=MEDIA)
    family = renderer.image_cache.family
    assert [(item.message_index, item.part, item.media.hash) for item in prompt.media] == find_image_parts(messages)
    in_spans = np.zeros(len(prompt.token_ids), bool)
    previous_stop = 0
    for item, image in zip(prompt.media, prompt.images):
        assert (image.media, image.start, image.stop) == (item.media, item.start, item.stop)
        assert not item.media.data  # cached prompts do not hold the bytes of images
        processed = renderer.image_cache.process(MEDIA[item.media.hash])
        text = renderer.tokenizer.decode(prompt.token_ids[item.start : item.stop])
        assert text == family.placeholder_text(processed)
        assert item.start >= previous_stop
        in_spans[item.start : item.stop] = True
        previous_stop = item.stop
    assert not (prompt.token_ids[~in_spans] == family.image_token_id).any()


def reply_to(renderer, prompt, text: str):
    opening = renderer.tokenizer.decode(prompt.token_ids[-1:])
    written = text if opening.endswith("\n") else f" {text}"  # as the template writes it after "Assistant:"
    ids = [*renderer.tokenizer.encode(written, continues_text=True).ids, renderer.stop_ids[-1]]
    return np.array(ids, np.int32), ParsedReply(Message("assistant", text), (0, len(ids) - 1))


def test_turns_with_images_never_break_and_make_one_trace(renderer):
    turns = [(RED, BLUE), (WIDE, RED), (TALL, TALL)]
    trace = Trace(id="t")
    builder, node, history, messages = TraceBuilder(trace), -1, None, []
    for number, (first, second) in enumerate(turns):
        message = Message("user", (part(first), part(second), TextPart(f"turn {number}")))
        messages.append(message)
        if history is None:
            prompt = renderer.render([message], media=MEDIA)
        else:
            prompt = renderer.bridge(history, [message], media=MEDIA)
            assert prompt.prefix_break is None and prompt.num_reused == len(history.token_ids)
        full_prompt = renderer.render(messages, media=MEDIA)
        assert prompt.token_ids.tolist() == full_prompt.token_ids.tolist()
        assert prompt.images == full_prompt.images
        ids, parsed = reply_to(renderer, prompt, f"reply {number}")
        node = builder.add_turn(
            Turn(
                ModelCall(f"call-{number}"),
                prompt.new_token_ids,
                prompt.spans,
                parsed.message,
                ids,
                [0.0] * len(ids),
                media=prompt.media,
                prefix_node=node,
            )
        )
        history = prompt.with_reply(ids, parsed)
        messages.append(parsed.message)
    assert [n.parent for n in trace.nodes] == [-1, 0, 1, 2, 3, 4]
    expected = [(image.start, image.stop, image.media.hash) for image in history.images]
    assert trace.graph.path_media(node) == expected and len(expected) == 6
    assert trace.graph.path_tokens(node).tolist() == history.token_ids.tolist()


def test_an_image_token_in_a_text_is_plain_text(renderer):
    marker = renderer.image_cache.family.marker
    messages = [
        Message("user", (TextPart(f"a {marker} in a text"), part(RED), TextPart(marker))),
        Message("assistant", f"I see {marker}"),
        Message("user", f"{marker}?"),
    ]
    prompt = renderer.render(messages, media=MEDIA)
    assert len(prompt.images) == 1
    text = renderer.tokenizer.decode(prompt.token_ids)
    assert f"a {marker} in a text" in text and f"I see {marker}" in text
    content_start, content_stop = prompt.spans[0].content_span
    content = renderer.tokenizer.decode(prompt.token_ids[content_start:content_stop])
    assert content.startswith(f"a {marker}") and content.endswith(marker)


def test_an_image_token_in_the_description_of_a_tool_is_plain_text(tmp_path):
    renderer = load_renderer(write_vision_directory(tmp_path, "tiny"))
    tool = {"type": "function", "function": {"name": "look", "description": "Show an <image>", "parameters": {}}}
    prompt = renderer.render(CONVERSATIONS["image, text"], [tool], media=MEDIA)
    assert len(prompt.images) == 1
    assert "Show an <image>" in renderer.tokenizer.decode(prompt.token_ids[: prompt.images[0].start])


def test_no_text_becomes_an_image_token(renderer):
    """The marker is hidden by another word in the meantime; a text with this word, or its beginning, stays."""
    marker = renderer.image_cache.family.marker
    for text in ("zqimagex", "zqimageqx", "zqimage", f"zqimage{marker}", f"{marker}zqimagex{marker}", "zqimagezq"):
        messages = [Message("user", (TextPart(text), part(RED), TextPart(text)))]
        prompt = renderer.render(messages, media=MEDIA)
        assert renderer.tokenizer.decode(prompt.token_ids).count(text) == 2
        ids, parsed = reply_to(renderer, prompt, "seen")
        bridged = renderer.bridge(prompt.with_reply(ids, parsed), messages, media=MEDIA)
        assert bridged.prefix_break is None and len(bridged.images) == 2
        assert renderer.tokenizer.decode(bridged.new_token_ids).count(text) == 2


def test_a_tool_that_the_template_writes_late_may_have_the_marker(tmp_path):
    model = write_vision_directory(tmp_path, "tiny")
    late_tools = "{%- if tools %}{{ tools | tojson }}{% endif -%}"
    opening = "{%- if add_generation_prompt %}"
    template = TEMPLATES["tiny"].replace(opening, late_tools + opening)
    (model / "chat_template.jinja").write_text(template)
    renderer = load_renderer(model)
    tool = {"type": "function", "function": {"name": "look", "description": "Show an <image>", "parameters": {}}}
    prompt = renderer.render(CONVERSATIONS["image, text"], [tool], media=MEDIA)
    ids, parsed = reply_to(renderer, prompt, "seen")
    bridged = renderer.bridge(prompt.with_reply(ids, parsed), CONVERSATIONS["only images"], media=MEDIA)
    assert len(bridged.images) == 3
    assert "Show an <image>" in renderer.tokenizer.decode(bridged.token_ids[bridged.images[-1].stop :])


def test_tool_results_may_have_images(renderer):
    call = Message("assistant", "", tool_calls=(ToolCall("call00000", "shot", "{}"),))
    result = Message("tool", (TextPart("here: "), part(RED)), tool_call_id="call00000")
    assert renderer.takes_tool_images
    prompt = renderer.render([Message("user", "go"), call, result], media=MEDIA)
    (item,) = prompt.media
    assert item.message_index == 2 and item.part == 1


def test_a_template_that_does_not_write_an_image_is_refused(tmp_path):
    model = write_vision_directory(tmp_path, "tiny")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TemplateRefused, match="wrote 0 of 2 images"):
        load_renderer(model).render(CONVERSATIONS["only images"], media=MEDIA)


def test_a_tokenizer_without_the_image_token_is_refused(tmp_path):
    model = write_vision_directory(tmp_path, "tiny")
    (model / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigInvalid, match="add the image token"):
        load_renderer(model).render(CONVERSATIONS["only images"], media=MEDIA)


def test_an_image_without_bytes_is_refused(renderer):
    with pytest.raises(ImageInvalid, match="which is missing"):
        renderer.render([Message("user", (part(make_square((1, 2, 3))),))])
