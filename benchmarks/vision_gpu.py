"""One RL step of a random model in the shape of Qwen3-VL-2B on a GPU: 8 groups of 16, two images in each prompt.

The engine samples the groups, the trainer trains on them, one after the other in this process. Counters show that each
of the 16 images is encoded once by the engine and once per step by the trainer. Of three waves of requests and of three
training steps the last is measured, because the first ones compile. `--small` runs a model of the same structure in
seconds on a CPU.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _check import Row, finish, parser
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore
from ramify.infer.images import ImageReference
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.model.images import ProcessedImage
from ramify.model.load import load_engine_model
from ramify.trace import AnnotatedTrace, Annotation, Forest, Media, MediaRef, Message, ModelCall, Trace, build_forest
from ramify.trace.version import PolicyVersion
from ramify.train import Batch, Trainer, TrainerConfig, load_loss, pack_forests
from ramify.train.build import freeze_vision_tower
from ramify.train.policy_model import compile_layers, load_policy

GROUPS, GROUP_SIZE, IMAGES_PER_PROMPT = 8, 16, 2
IMAGE_TOKEN, SMALL_IMAGE_TOKEN = 151655, 500
STEPS = 3


def build_config(small: bool) -> Qwen3VLConfig:
    """Return the config of Qwen3-VL-2B, or of a small model of the same structure."""
    text: dict[str, Any] = {
        "vocab_size": 512 if small else 151_936,
        "hidden_size": 64 if small else 2048,
        "intermediate_size": 128 if small else 6144,
        "num_hidden_layers": 4 if small else 28,
        "num_attention_heads": 4 if small else 16,
        "num_key_value_heads": 2 if small else 8,
        "head_dim": 16 if small else 128,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [4, 2, 2] if small else [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 4 if small else 24,
        "hidden_size": 32 if small else 1024,
        "intermediate_size": 64 if small else 4096,
        "num_heads": 2 if small else 16,
        "patch_size": 4 if small else 16,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64 if small else 2304,
        "deepstack_visual_indexes": [0, 1, 2] if small else [5, 11, 17],
    }
    image_token = SMALL_IMAGE_TOKEN if small else IMAGE_TOKEN
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image_token,
        video_token_id=image_token + 1,
        vision_start_token_id=image_token - 3,
        vision_end_token_id=image_token - 2,
        tie_word_embeddings=True,
    )


class Workload:
    """Prompts with two random images each, as the engine and the trainer get them."""

    def __init__(self, config: Qwen3VLConfig, side: int, text_tokens: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.config, self.side, self.text_tokens, self.seed = config, side, text_tokens, seed
        self.images: dict[str, ProcessedImage] = {}
        self.prompts = [self._build_prompt(group) for group in range(GROUPS)]

    def _build_image(self, media: Media) -> ProcessedImage:
        vision: Any = self.config.vision_config
        side = self.side
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = self.rng.normal(size=(4 * side * side, width)).astype(np.float32)
        arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2 * side, 2 * side]], np.int64)}
        return ProcessedImage(media.hash, "qwen3_vl", arrays, (1, side, side), side * side)

    def _build_prompt(self, group: int) -> tuple[list[int], list[tuple[Media, int, int]]]:
        ids: list[int] = []
        images: list[tuple[Media, int, int]] = []
        for number in range(IMAGES_PER_PROMPT):
            ids += self.rng.integers(0, 400, self.text_tokens // IMAGES_PER_PROMPT).tolist()
            media = Media.from_bytes(b"%d %d %d" % (self.seed, group, number), "image/png")
            self.images[media.hash] = self._build_image(media)
            ids.append(self.config.vision_start_token_id)
            images.append((media, len(ids), len(ids) + self.side**2))
            ids += [self.config.image_token_id] * self.side**2 + [self.config.vision_end_token_id]
        return ids, images

    def build_requests(
        self, core: EngineCore, reply_tokens: int, *, trainable: bool = True
    ) -> list[tuple[int, EngineRequest]]:
        """Return 16 requests for each prompt. Trainable ones have a bias against image tokens."""
        for image in self.images.values():
            core.get_uploaded_images().add(image)
        markers = range(self.config.vision_end_token_id - 1, self.config.video_token_id + 1) if trainable else ()
        params = SamplingParams(max_tokens=reply_tokens, logit_bias=tuple((token, -1e6) for token in markers))
        return [
            (group, core.create_request(ids, params, images=[ImageReference(m.hash, a, b) for m, a, b in images]))
            for group, (ids, images) in enumerate(self.prompts)
            for _ in range(GROUP_SIZE)
        ]

    def build_forests(self, requests: list[tuple[int, EngineRequest]]) -> list[Forest]:
        """Return the forest of each group, with random advantages."""
        traces: list[list[AnnotatedTrace]] = [[] for _ in range(GROUPS)]
        for number, (group, request) in enumerate(requests):
            ids, images = self.prompts[group]
            trace = Trace(id=f"t{number}")
            refs = [MediaRef(part, trace.add_media(m), a, b) for part, (m, a, b) in enumerate(images)]
            trace.graph.add_node(-1, Message("user"), ids, media=refs)
            reply, name = request.token_ids[len(ids) :], f"t{number}"
            trace.graph.add_node(
                0,
                Message("assistant"),
                reply,
                sampled_span=(0, len(reply)),
                logprobs=request.logprobs,
                call=ModelCall(name),
            )
            annotation = Annotation(name, 1, advantage=float(self.rng.normal()))
            traces[group].append(AnnotatedTrace(trace, (annotation,)))
        return [build_forest(group) for group in traces]


def sample(core: EngineCore, requests: list[tuple[int, EngineRequest]]) -> float:
    """Run the requests to their end, and return the seconds it took."""
    started = time.perf_counter()
    for _, request in requests:
        core.enqueue(request)
    while core.has_unfinished_requests:
        core.step()
    return time.perf_counter() - started


def main() -> int:
    """Measure and print."""
    flags = parser(__doc__)
    flags.add_argument("--small", action="store_true", help="a small model, to try the script on a CPU")
    flags.add_argument("--no-compile", action="store_true", help="do not compile the layers")
    flags.add_argument("--freeze-vision", action="store_true", help="do not train the vision tower")
    options = flags.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = build_config(options.small)
    side, text_tokens, reply_tokens = (3, 16, 8) if options.small else (16, 128, 256)
    workload = Workload(config, side, text_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config)
        num_weights = sum(weight.numel() for weight in model.parameters())
        model.bfloat16().save_pretrained(directory)
        del model
        core = EngineCore(
            load_engine_model(directory, device=device.type),
            EngineConfig(max_running_requests=128, max_num_batched_tokens=8192, kv_cache_tokens=128 * 1024),
            PolicyVersion("random"),
        )
        requests = workload.build_requests(core, reply_tokens)
        sample(core, requests)
        encoded, cached = core.counters.encoded_images, core.counters.prefix_hit_tokens
        for seed in (1, 2):  # the first of them compiles and captures
            other = Workload(config, side, text_tokens, seed)
            sample_seconds = sample(core, other.build_requests(core, reply_tokens, trainable=False))
            print(f"sampling without logit_bias: {sample_seconds:.4g} s", flush=True)
        del core
        policy = load_policy(directory, load_loss("dppo", {}), device=device)
    if options.freeze_vision:
        freeze_vision_tower(policy)
    if device.type == "cuda" and not options.no_compile:
        compile_layers(policy)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainer = Trainer(policy, TrainerConfig(), dtype=dtype, load_image=lambda media: workload.images[media.hash])
    packs = pack_forests(workload.build_forests(requests), trainer.config.max_pack_tokens)
    metrics = [trainer.step(Batch.from_packs(step, packs)) for step in range(STEPS)]
    last = metrics[-1]
    images = GROUPS * IMAGES_PER_PROMPT
    return finish(
        f"one RL step of {GROUPS} x {GROUP_SIZE} with two images each, {num_weights / 1e9:.2f} B weights",
        [
            Row("sampling without logit_bias", sample_seconds, None, "s"),
            Row("sampled tokens per second", GROUPS * GROUP_SIZE * reply_tokens / sample_seconds, None, "1/s"),
            Row("prompt tokens that were cached", float(cached), None, ""),
            Row("images encoded by the engine", float(encoded), None, "", target=float(images), exactly=True),
            Row("training step", last.seconds, None, "s"),
            Row("tokens of the forest", float(last.sums.tokens), None, ""),
            Row("flat tokens over forest tokens", last.token_ratio, None, "", at_least=True),
            Row("images encoded by the trainer", float(last.sums.images), None, "", target=float(images), exactly=True),
            Row("TFLOPs of the step", last.sums.flops / 1e12, None, ""),
            Row("MFU", 100 * (last.mfu or 0.0), None, "%", at_least=True),
            Row("mismatch KL of the first step", metrics[0].to_dict()["mismatch_kl"], None, ""),
        ],
        options,
    )


if __name__ == "__main__":
    raise SystemExit(main())
