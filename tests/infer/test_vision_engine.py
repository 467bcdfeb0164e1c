"""With images, too, the engine's logprobs equal transformers' own forward, and no image is encoded twice."""

import os
from functools import lru_cache
from pathlib import Path
from random import Random

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from ramify.core.errors import ImageMissing, RequestInvalid
from ramify.infer.engine_core import EngineCore
from ramify.infer.images import ImageReference, UploadedImages
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.model.fused_model import FusedModel
from ramify.model.images import ProcessedImage
from ramify.model.weights import publish_weights, stage_weights
from ramify.trace.version import PolicyVersion
from tests.support.models import (
    FAMILIES,
    IMAGE,
    build_core,
    build_image_inputs,
    draw_image_run,
    process,
    run,
    sampled_ids,
    write_llama,
    write_vision_model,
)
from tests.support.native_server import run_server

A, B = PolicyVersion("vision", 0, 1), PolicyVersion("vision", 0, 2)
CLOSE = 1e-4
ROUNDS = 20 if os.environ.get("RAMIFY_FULL") else 2
NO_MARKERS = ((56, -1e6), (57, -1e6), (58, -1e6), (59, -1e6))  # transformers would look for the image of a sampled one
SETTINGS = {"max_num_batched_tokens": 7, "max_running_requests": 4}  # prefill splits images


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    """A family, two models of it that differ also in the tower, one with the first one's tower."""
    directory: Path = tmp_path_factory.mktemp("vision")
    models = {
        version: write_vision_model(directory / f"source-{version.step}", request.param, version.step)
        for version in (A, B)
    }
    return request.param, directory, models


@pytest.fixture(scope="module")
def shared_core(world):
    return build_core(world[2][A], A)


@pytest.fixture
def core(shared_core):
    shared_core.pool.reset_prefix_cache([])
    return shared_core


one_family = pytest.mark.parametrize(
    "world",
    ["qwen3_vl", pytest.param("idefics3", marks=pytest.mark.full("the engine does the same for every family"))],
    indirect=True,
    scope="module",
)


class Prompt:
    """A prompt with images, each between some text."""

    def __init__(self, rng: Random, family: str, images: list[bytes]) -> None:
        self.ids: list[int] = []
        self.images = images
        self.references: list[ImageReference] = []
        for data in images:
            tokens, (start, stop, _) = draw_image_run(rng, family, data)
            offset = len(self.ids)
            self.references.append(ImageReference(process(family, data).hash, offset + start, offset + stop))
            self.ids += tokens


def upload(core: EngineCore, family: str, images: list[bytes]) -> None:
    for data in images:
        core.get_uploaded_images().add(process(family, data))


def submit(core: EngineCore, prompt: Prompt, tail: list[int] | None = None, max_tokens: int = 5) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, logit_bias=NO_MARKERS)
    return core.create_request([*prompt.ids, *(tail or [5])], params, images=prompt.references)


@lru_cache(maxsize=4)
def load_reference(source: Path):
    """Load a model for transformers' own forward; no test changes what it has written."""
    return AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def check_logprobs(
    family: str, source: Path, request: EngineRequest, images: list[bytes], start: int = 0, *, markers: bool = False
) -> None:
    """Compare the logprobs of the sampled tokens from `start` on with plain transformers.

    `markers` says whether the tokens that mark images could have been sampled.
    """
    model = load_reference(source)
    image_inputs = build_image_inputs(family)(request.token_ids, images)
    with torch.no_grad():
        logits = model(torch.tensor([request.token_ids]), use_cache=False, **image_inputs).logits[0]
    if not markers:
        logits[:, 56:] = -torch.inf
    first = len(request.prompt_token_ids)
    rows = torch.log_softmax(logits, -1)[first - 1 : -1]
    expected = rows.gather(1, torch.tensor(sampled_ids(request)).unsqueeze(1)).squeeze(1)
    assert (expected - torch.tensor(request.logprobs))[start:].abs().max() < CLOSE


@pytest.mark.promise
def test_logprobs_across_prefix_hits_and_split_images(world):
    family, _, models = world
    core = build_core(models[A], A, **SETTINGS)
    images = [b"one", b"two", b"three"]
    upload(core, family, images)
    for seed in range(ROUNDS):
        rng = Random(seed)
        first = Prompt(rng, family, rng.choices(images, k=3))
        requests = [submit(core, first, [rng.randrange(3, 50) for _ in range(count)]) for count in (1, 5, 9)]
        run(core, *requests)
        run(core, later := submit(core, first, [7, 8, 9]))
        for request in (*requests, later):
            check_logprobs(family, models[A], request, first.images)
        assert later.num_cached_tokens > max(reference.start for reference in first.references)
    assert core.counters.prefill_chunks > 0
    assert core.counters.encoded_images == len(images)


def test_decoding_after_images_runs_the_fused_operators(world, core):
    family, _, models = world
    assert core.runner.fused_model is not None
    upload(core, family, [b"one", b"two"])
    prompt = Prompt(Random(6), family, [b"one", b"two"])
    ids = [*prompt.ids, 5, 6]
    num_encoded = core.counters.encoded_images
    params = SamplingParams(max_tokens=9)  # sampled on the device, if there is one: steps are launched ahead
    requests = run(core, *(core.create_request(ids, params, images=prompt.references) for _ in range(16)))
    without_markers = [request for request in requests if max(sampled_ids(request)) < 56]
    assert len(without_markers) >= 2
    for request in without_markers:
        check_logprobs(family, models[A], request, prompt.images, markers=True)
    assert core.counters.encoded_images - num_encoded == 2
    assert core.counters.replayed_steps > 0 or core.model.device.type != "cuda"


def test_equal_prompts_with_different_images_share_nothing_after_the_first_difference(world, core):
    family, _, models = world
    same_shape: dict[tuple[int, ...], list[bytes]] = {}
    for number in range(40):
        image = process(family, data := b"image %d" % number)
        same_shape.setdefault(image.grid, []).append(data)
    left, right = next(images for images in same_shape.values() if len(images) > 1)[:2]
    upload(core, family, [left, right])
    prompts = [Prompt(Random(0), family, [data]) for data in (left, right)]
    assert prompts[0].ids == prompts[1].ids
    requests = []
    for prompt in prompts:
        requests += run(core, submit(core, prompt, [5] * 20))
    assert requests[1].num_cached_tokens <= prompts[1].references[0].start
    assert requests[0].logprobs != requests[1].logprobs
    for request, prompt in zip(requests, prompts):
        check_logprobs(family, models[A], request, prompt.images)
    (without,) = run(core, core.create_request([*prompts[0].ids, *[5] * 20], SamplingParams(max_tokens=2)))
    assert without.num_cached_tokens <= prompts[0].references[0].start


def publish(directory: Path, source: Path, version: PolicyVersion, tower_of: Path | None = None) -> Path:
    """Publish the weights of `source`, with the vision tower of another model if one is given."""
    tensors = load_file(source / "model.safetensors")
    if tower_of is not None:
        names = ("vision_model", "connector", "visual")
        tower = load_file(tower_of / "model.safetensors")
        tensors |= {name: value for name, value in tower.items() if any(part in name for part in names)}
    return publish_weights(directory, tensors, version, base_model=source)


@pytest.fixture(scope="module")
def published(world):
    _, directory, models = world
    return publish(directory / "published", models[B], B)


@one_family
@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_weights_are_swapped_in_flight(world, mode, published):
    family, _, models = world
    core = build_core(models[A], A, **SETTINGS)
    upload(core, family, [b"one", b"two"])
    prompt = Prompt(Random(1), family, [b"one", b"two"])
    request = submit(core, prompt, max_tokens=12)
    core.enqueue(request)
    while len(request.logprobs) < 4:
        core.step()
    core.swap_weights(stage_weights(published, core.model.module), mode)
    run(core)
    assert [version for version, _ in request.version_starts] == [A, B]
    if mode == "recompute":
        check_logprobs(family, published, request, prompt.images, start=4)
        assert core.counters.encoded_images == 4
    else:
        assert core.counters.encoded_images == 2
    (fresh,) = run(core, submit(core, prompt))
    check_logprobs(family, published, fresh, prompt.images)
    assert core.counters.encoded_images == 4


@one_family
@pytest.mark.parametrize("frozen", [False, True])
def test_a_group_encodes_its_image_once_per_version_of_the_tower(world, frozen, published, tmp_path):
    family, _, models = world
    core = build_core(models[A], A, max_running_requests=16)
    upload(core, family, [b"one"])
    prompt = Prompt(Random(2), family, [b"one"])
    if frozen:
        published = publish(tmp_path / "b", models[B], B, models[A])
    for source in (models[A], published):
        if source == published:
            core.swap_weights(stage_weights(published, core.model.module))
        requests = run(core, *(submit(core, prompt) for _ in range(16)))
        check_logprobs(family, source, requests[3], prompt.images)
    assert core.counters.encoded_images == (1 if frozen else 2)


def copy_image(image: ProcessedImage, name: str) -> ProcessedImage:
    """Return the image under another hash."""
    return ProcessedImage(name, image.family, image.arrays, image.grid, image.num_tokens)


@one_family
def test_lost_images_are_asked_for_again_and_running_requests_keep_theirs(world):
    family, _, models = world
    image = process(family, b"one")
    core = build_core(models[A], A, **SETTINGS)
    core.uploaded_images = UploadedImages(core.model.tower, 2 * image.num_bytes, use_timeout=0.0)
    prompt = Prompt(Random(3), family, [b"one"])
    hash = prompt.references[0].hash
    with pytest.raises(ImageMissing, match=hash):
        submit(core, prompt)
    upload(core, family, [b"one"])
    request = submit(core, prompt, [5] * 30)
    for number in range(3):  # fills the cache with other images
        core.uploaded_images.add(copy_image(image, f"{number}"))
    with pytest.raises(ImageMissing, match=hash):
        submit(core, prompt)
    run(core, request)
    check_logprobs(family, models[A], request, prompt.images)


@pytest.fixture(scope="module")
def tower_and_image(world, shared_core):
    return shared_core.model.tower, process(world[0], b"one")


@one_family
def test_images_stay_until_they_are_used_even_if_they_exceed_the_cache(tower_and_image):
    tower, image = tower_and_image
    uploaded = UploadedImages(tower, 2 * image.num_bytes)
    for name in "012":
        uploaded.add(copy_image(image, name))
    assert uploaded._find(["0", "1", "2"]).keys() == {"0", "1", "2"}
    uploaded.add(copy_image(image, "3"))  # the others were used
    with pytest.raises(ImageMissing) as raised:
        uploaded._find(["0", "1", "2", "3"])
    assert raised.value.hashes == ("0", "1")
    for number in range(9):  # images that nobody uses are bounded, too
        uploaded.add(copy_image(image, f"unused {number}"))
        assert len(uploaded._images) <= 4


@one_family
def test_images_that_are_not_used_soon_are_dropped(tower_and_image):
    tower, image = tower_and_image
    uploaded = UploadedImages(tower, image.num_bytes, use_timeout=0.0)
    for name in "01":
        uploaded.add(copy_image(image, name))
    assert list(uploaded._images) == ["1"]


@one_family
def test_image_that_is_uploaded_again_is_kept_for_the_next_request(tower_and_image):
    tower, image = tower_and_image
    uploaded = UploadedImages(tower, 2 * image.num_bytes)
    for name in "01":
        uploaded.add(copy_image(image, name))
    uploaded._find(["0", "1"])
    for name in "02":
        uploaded.add(copy_image(image, name))
    assert list(uploaded._images) == ["0", "2"]


def test_wrong_images_are_refused_when_they_arrive(world, core):
    family, _, _ = world
    image = process(family, b"never uploaded")
    uploaded = core.get_uploaded_images()
    pixels = {"pixel_values": image.arrays["pixel_values"][:, :1]}
    wrong = [
        ProcessedImage(image.hash, "other", image.arrays, image.grid, image.num_tokens),
        ProcessedImage(image.hash, family, {}, image.grid, image.num_tokens),
        ProcessedImage(image.hash, family, image.arrays, image.grid, image.num_tokens + 1),
        ProcessedImage(image.hash, family, image.arrays | pixels, image.grid, image.num_tokens),
    ]
    for item in wrong:
        with pytest.raises(RequestInvalid):
            uploaded.add(item)
    uploaded.add(image)
    prompt = Prompt(Random(4), family, [b"never uploaded"])
    (reference,) = prompt.references
    for bad in (reference._replace(stop=999), reference._replace(stop=reference.start), reference._replace(start=-1)):
        with pytest.raises(RequestInvalid):
            core.create_request(prompt.ids, SamplingParams(), images=[bad])
    with pytest.raises(RequestInvalid, match="image tokens"):
        core.create_request(
            [IMAGE, *prompt.ids[1:]],
            SamplingParams(),
            images=[ImageReference(image.hash, 0, 1)]
            if image.num_tokens > 1
            else [ImageReference(image.hash, len(prompt.ids) - 1, len(prompt.ids))],
        )


def test_a_text_model_refuses_images(tmp_path):
    core = build_core(write_llama(tmp_path / "llama"))
    with pytest.raises(RequestInvalid, match="text only"):
        core.create_request([1, 2, 3], SamplingParams(), images=[ImageReference("00", 0, 1)])


@one_family
def test_batch_invariant_mode_reads_images(world):
    family, _, models = world
    core = build_core(models[A], A, batch_invariant=True, max_num_batched_tokens=16)
    upload(core, family, [b"one", b"two"])
    prompts = [Prompt(Random(seed), family, [b"one", b"two"]) for seed in range(2)]
    params = SamplingParams(seed=1, max_tokens=6, logit_bias=NO_MARKERS)
    alone, *_ = run(core, core.create_request(prompts[0].ids, params, images=prompts[0].references))
    core.pool.reset_prefix_cache([])
    together, *_ = run(core, *(core.create_request(p.ids, params, images=p.references) for p in prompts))
    assert alone.logprobs == together.logprobs
    check_logprobs(family, models[A], alone, prompts[0].images)


@one_family
def test_an_image_is_uploaded_once_and_asked_for_if_it_is_missing(world):
    family, _, models = world
    prompt = Prompt(Random(5), family, [b"one"])
    (reference,) = prompt.references
    image = process(family, b"one")
    fields = {"hash": reference.hash, "start": reference.start, "stop": reference.stop}
    body = {"token_ids": prompt.ids, "images": [fields], "sampling_params": {"n": 2, "max_tokens": 2}}
    with run_server(build_core(models[A], A)) as (url, _), httpx.Client(base_url=url, timeout=30) as http:
        missing = http.post("/inference/v1/generate", json=body)
        assert missing.status_code == 409
        assert missing.json()["error"]["type"] == "ImageMissing"
        assert missing.json()["error"]["hashes"] == [image.hash]
        wrong_path = http.put("/inference/v1/images/00", content=image.encode())
        assert (wrong_path.status_code, wrong_path.json()["error"]["type"]) == (400, "RequestInvalid")
        assert http.put(f"/inference/v1/images/{image.hash}", content=b"nonsense").status_code == 400
        assert http.put(f"/inference/v1/images/{image.hash}", content=image.encode()).status_code == 200
        assert len(http.post("/inference/v1/generate", json=body).json()["choices"]) == 2
        assert "ramify_encoded_images_total 1" in http.get("/metrics").text


def test_fused_model_passes_a_position_per_axis_to_the_rotary_embedding(world):
    module = AutoModelForImageTextToText.from_pretrained(world[2][A])
    dimensions: list[int] = []
    module.get_decoder().rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: dimensions.append(kwargs["position_ids"].ndim), with_kwargs=True
    )
    FusedModel(module)
    assert dimensions == [3 if "mrope_section" in module.config.get_text_config().rope_parameters else 2]
