"""The packaged vision-language model: an ordinary directory, which reads the squares of color-codeword unreliably."""

import json
from itertools import islice

from safetensors.numpy import load_file

from ramify.env.tasksets.color_codeword import make_square
from ramify.env.tasksets.splits import assign_split
from ramify.model.images import load_image_family
from ramify.model.render import load_renderer
from ramify.model.resolve import read_max_positions, read_vocab_size, resolve_model_path
from ramify.trace import Media, MediaPart, Message, TextPart
from ramify.train.sft import run_sft
from tools.tiny.stages import SftStage, build_sft_config, write_stage_data
from tools.tiny.vision_model import IMAGE_TOKENS, write_bfloat16_vision_model, write_initial_vision_model
from tools.tiny.vision_stages import draw_codewords, draw_square_rows

TINY_VISION = resolve_model_path("tiny-vision")
RED = Media.from_bytes(make_square((255, 0, 0)), "image/png")


def test_transformers_loads_the_model_and_processes_images_alike():
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(TINY_VISION, dtype=torch.float32, local_files_only=True)
    assert sum(weight.numel() for weight in model.parameters()) <= 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(TINY_VISION, local_files_only=True)
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<image>")
    family = load_image_family(TINY_VISION)
    image = family.process(RED)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text.replace("<image>", family.placeholder_text(image)), add_special_tokens=False).input_ids
    rendered = load_renderer(TINY_VISION).render(
        [Message("user", (MediaPart(RED.hash), TextPart("Which?")))], media={RED.hash: RED}
    )
    assert rendered.token_ids.tolist() == ids
    pixels = torch.from_numpy(image.arrays["pixel_values"]).unsqueeze(0)
    logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits
    assert logits.shape == (1, len(ids), read_vocab_size(TINY_VISION))
    assert read_max_positions(TINY_VISION) == 2048


def test_directory_is_small_and_reads_squares_unreliably():
    assert sum(file.stat().st_size for file in TINY_VISION.iterdir()) <= 2_000_000
    record = json.loads((TINY_VISION / "ramify.json").read_text())
    figures = record["figures"]
    assert record["seed"] == 0
    assert figures["codeword_letters"] >= 0.95
    assert 0.3 <= figures["codeword_match"] <= 0.6
    assert figures["codeword_spread"] >= 0.1


def test_images_are_rendered_in_every_role_that_may_hold_them():
    renderer = load_renderer(TINY_VISION)
    parts = (MediaPart(RED.hash), TextPart("x"), MediaPart(RED.hash))
    for role in ("user", "tool"):
        rendered = renderer.render([Message("user", "hi"), Message(role, parts)], media={RED.hash: RED})
        assert len(rendered.images) == 2
    assert all(len(renderer.tokenizer.encode(token).ids) == 1 for token in IMAGE_TOKENS)


def test_no_training_codeword_is_from_the_eval_split():
    for row in islice(draw_codewords(0, 0.0), 200):
        assert assign_split(row["messages"][-1]["content"]) == "train"


def test_stages_are_reproducible(tmp_path):
    stage = SftStage("short", draw_square_rows, steps=2, batch_size=2, warmup_steps=1)
    write_initial_vision_model(tmp_path / "start", seed=0)
    write_stage_data(stage, tmp_path / "rows.jsonl", seed=0)
    weights: list[bytes] = []
    for number in range(2):
        config = build_sft_config(stage, tmp_path / "rows.jsonl", tmp_path / "start", tmp_path / f"{number}", seed=0)
        done = run_sft(config)
        write_bfloat16_vision_model(done.weights, tmp_path / f"model{number}")
        weights.append((tmp_path / f"model{number}" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert {value.dtype.name for value in load_file(done.weights / "model.safetensors").values()} == {"float32"}
