"""What engine and trainer do with a model, by its config alone: the row of `docs/models.md`, and of `ramify doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ramify.core.errors import ModelUnsupported
from ramify.model.experts import describe_experts, read_expert_counts
from ramify.model.fused_model import can_fuse
from ramify.model.load import load_config, read_shape
from ramify.model.pack_layout import (
    TEXT_PART_MODEL_TYPES,
    VISION_MODEL_TYPES,
    PackLayout,
    choose_pack_layout,
    describe_pack_layout,
)
from ramify.model.resolve import read_model_config

REFUSED = "refused"
FUSED = "fused"
OWN_CODE = "own code"  # transformers' code of the model, with the paged cache
FOREST = PackLayout.FOREST.value
CHAINS = PackLayout.CHAINS.value
REFUSAL_TESTED = "only that it is refused"


class TestedVariant(NamedTuple):
    """What was tested of a family, and with which engine and trainer, as in `ModelSupport`."""

    engine: str
    trainer: str
    tests: str


# What was tested of each family, by model type: the last column of the table in `docs/models.md`.
TESTED = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "qwen3_vl", "smolvlm", "idefics3"),
        TestedVariant(FUSED, FOREST, "runs, gradients and logprobs on CPU and H200"),
    ),
    "mistral": TestedVariant(OWN_CODE, FOREST, "gradients on CPU and H200"),
    **dict.fromkeys(("qwen3_moe", "mixtral"), TestedVariant(OWN_CODE, FOREST, "a run and gradients on CPU")),
    **dict.fromkeys(
        ("gpt_oss", "gemma2"),
        TestedVariant(OWN_CODE, FOREST, "gradients and logprobs on CPU; kernels, engine and gradients on H200"),
    ),
    "granite": TestedVariant(FUSED, FOREST, "logprobs of engine and trainer on CPU"),
    **dict.fromkeys(
        ("granitemoehybrid", "bamba"),
        TestedVariant(OWN_CODE, FOREST, "gradients, and logprobs of engine and trainer, on CPU"),
    ),
    **dict.fromkeys(
        ("phi3", "smollm3", "seed_oss"),
        TestedVariant(FUSED, FOREST, "logprobs of the engine on CPU; the trainer's check on CPU"),
    ),
    **dict.fromkeys(
        ("granite_swa", "cohere", "cohere2"), TestedVariant(OWN_CODE, FOREST, "logprobs of the trainer on CPU")
    ),
    **dict.fromkeys(
        ("gemma3_text", "olmo2", "olmo3", "glm4", "ernie4_5", "glm4_moe", "minimax_m2"),
        TestedVariant(OWN_CODE, FOREST, "the checks when they are loaded, on CPU"),
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text"),
        TestedVariant(
            FUSED,
            FOREST,
            "runs with kills, gradients and logprobs on CPU; training steps, gradients and the engine on H200",
        ),
    ),
    "lfm2": TestedVariant(FUSED, FOREST, "gradients and logprobs on CPU; gradients and tests of the engine on H200"),
    "olmo_hybrid": TestedVariant(OWN_CODE, FOREST, "gradients and logprobs on CPU"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "lfm2_moe"),
        TestedVariant(OWN_CODE, FOREST, "gradients and logprobs of Qwen3-Next on CPU"),
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), TestedVariant(REFUSED, CHAINS, "the check of the trainer on CPU")),
    **dict.fromkeys(("falcon_h1", "nemotron_h"), TestedVariant(REFUSED, FOREST, "gradients on CPU")),
    "minimax": TestedVariant(REFUSED, CHAINS, "gradients on CPU"),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "kimi_linear",
            "minicpm3",
            "gemma4",
            "llama4",
            "llama4_text",
            "mimo_v2_flash",
            "deepseek_v4",
            "gptj",
            "codegen",
            "rwkv",
            "nemotron",
            "bert",
            "roberta",
            "modernbert",
            "t5",
            "bart",
        ),
        TestedVariant(REFUSED, REFUSED, REFUSAL_TESTED),
    ),
    "gpt2": TestedVariant(OWN_CODE, REFUSED, "the engine's check on CPU"),
}
NOT_TESTED = "not tested"
CHECKED_WHEN_LOADED = "not tested: it is compared with its own code when it is loaded"
VLLM_ADVICE = 'inference.engine = "vllm" runs it in vLLM, if that knows the model'
OWN_CODE_NOTE = "engine: transformers' code of the model, which is slower than fused operators in CUDA graphs"


@dataclass(frozen=True, slots=True)
class ModelSupport:
    """How a family of models runs.

    `engine` is `fused`, `own code` or `refused`; `trainer` is `forest`, `chains` or `refused`; `lora` says which linear
    maps get adapters; `images` is whether images are read; `tested` is what the project has tested of the family.
    `notes` are sentences with reasons.
    """

    model_type: str
    engine: str
    trainer: str
    lora: str
    images: str
    tested: str
    notes: tuple[str, ...] = ()


def read_model_support(config: Any) -> ModelSupport:
    """Return how the model of a Hugging Face config runs."""
    reasons: dict[str, str] = {}
    try:
        read_shape(config)
        engine = FUSED if can_fuse(config.get_text_config()) else OWN_CODE
    except ModelUnsupported as error:
        engine, reasons["engine"] = REFUSED, str(error)
    try:
        trainer = choose_pack_layout(config).value
    except ModelUnsupported as error:
        trainer, reasons["trainer"] = REFUSED, str(error)
    if len(reasons) == 2 and reasons["engine"] == reasons["trainer"]:
        notes = [reasons["engine"]]
    else:
        notes = [f"{part}: {reason}" for part, reason in reasons.items()]
    if engine == OWN_CODE:
        notes.append(OWN_CODE_NOTE)
    settings = config.to_dict()
    if trainer != REFUSED:
        if engine != FUSED and config.model_type not in TEXT_PART_MODEL_TYPES:
            notes.append(f"engine: {VLLM_ADVICE}")
        notes.append(f"trainer: {describe_pack_layout(config)}")
        if experts := describe_experts(settings):
            notes.append(experts)
    lora = "no" if trainer == REFUSED else "not experts" if read_expert_counts(settings) else "yes"
    images = "yes" if config.model_type in VISION_MODEL_TYPES else "no"
    tested = _describe_tests(config.model_type, engine, trainer)
    return ModelSupport(config.model_type, engine, trainer, lora, images, tested, tuple(notes))


def _describe_tests(model_type: str, engine: str, trainer: str) -> str:
    """Return what was tested of a model that is run this way."""
    variant = TESTED.get(model_type)
    if engine == trainer == REFUSED:
        is_tested = variant is not None and variant.tests == REFUSAL_TESTED
        return REFUSAL_TESTED if is_tested else NOT_TESTED
    if variant is None:
        return CHECKED_WHEN_LOADED
    if (variant.engine, variant.trainer) != (engine, trainer):
        return f"another variant of the family ({variant.engine}, {variant.trainer}), not this one: {variant.tests}"
    return variant.tests


def read_directory_support(path: Path) -> ModelSupport:
    """Return how the model in a directory runs; only its config is read."""
    try:
        return read_model_support(load_config(path))
    except ModelUnsupported as error:
        model_type = str(read_model_config(path).get("model_type", "unknown"))
        return ModelSupport(model_type, REFUSED, REFUSED, "no", "no", NOT_TESTED, (str(error),))


def check_model_supported(path: Path, *, by_trainer: bool = True, by_engine: bool = False) -> None:
    """Raise ModelUnsupported if the trainer or the native engine refuses a model by its config."""
    config = load_config(path)
    if by_trainer:
        choose_pack_layout(config)
    if by_engine:
        try:
            read_shape(config)
        except ModelUnsupported as error:
            if config.model_type in TEXT_PART_MODEL_TYPES:
                raise
            raise ModelUnsupported(f"{error}; {VLLM_ADVICE}") from None
