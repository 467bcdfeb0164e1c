"""From a seed to a model directory: train in stages, write, measure what was written, move it into place."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ramify.core.display import Display
from ramify.train.sft import run_sft
from ramify.train.sft.display import SftDisplay
from tools.tiny import MODEL_INFO_FILE, RECIPE_VERSION
from tools.tiny.hybrid_model import (
    HYBRID_RECIPE_VERSION,
    HYBRID_STAGES,
    measure_hybrid_model,
    write_bfloat16_hybrid_model,
    write_initial_hybrid_model,
)
from tools.tiny.metrics import measure_model
from tools.tiny.stages import STAGES, SftStage, build_sft_config, write_stage_data
from tools.tiny.vision_model import write_bfloat16_vision_model, write_initial_vision_model
from tools.tiny.vision_stages import VISION_RECIPE_VERSION, VISION_STAGES, measure_vision_model
from tools.tiny.weights import write_bfloat16_model, write_initial_model


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """How a model is made: its initial weights, the stages of its training, and how it is written."""

    version: int
    """Raised whenever the same seed gives another model."""
    write_initial_model: Callable[[Path, int], None]
    """Writes a model directory from a seed."""
    stages: Sequence[SftStage]
    write_bfloat16_model: Callable[[Path, Path], None]
    """Writes the trained model of a directory as it ships."""
    measure: Callable[[Path, int], dict[str, float]]
    """Returns the figures of a model directory, sampled with a seed."""


RECIPES = {
    "tiny": ModelRecipe(
        RECIPE_VERSION,
        write_initial_model,
        STAGES,
        write_bfloat16_model,
        lambda directory, seed: measure_model(directory, seed=seed).to_dict(),
    ),
    "tiny-vision": ModelRecipe(
        VISION_RECIPE_VERSION,
        write_initial_vision_model,
        VISION_STAGES,
        write_bfloat16_vision_model,
        measure_vision_model,
    ),
    "tiny-hybrid": ModelRecipe(
        HYBRID_RECIPE_VERSION,
        write_initial_hybrid_model,
        HYBRID_STAGES,
        write_bfloat16_hybrid_model,
        measure_hybrid_model,
    ),
}


def build_model(name: str, directory: Path, *, seed: int, display: Callable[[], SftDisplay] = Display) -> None:
    """Build the model `name` into `directory`, in place of what was there; `display` shows each stage."""
    recipe = RECIPES[name]
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staging_dir = Path(scratch) / "model"
        recipe.write_bfloat16_model(_train_stages(recipe, Path(scratch), seed, display), staging_dir)
        display().print_line("measuring")
        figures = recipe.measure(staging_dir, seed)
        model_info = {
            "name": name,
            "recipe": recipe.version,
            "seed": seed,
            "built": datetime.now(UTC).date().isoformat(),
            "minutes": round((time.monotonic() - started) / 60, 1),
            "figures": figures,
        }
        (staging_dir / MODEL_INFO_FILE).write_text(json.dumps(model_info, indent=2) + "\n", "utf-8")
        if directory.exists():
            shutil.move(directory, Path(scratch) / "old")
        staging_dir.replace(directory)
    display().print_line(f"wrote {directory}")


def _train_stages(recipe: ModelRecipe, scratch: Path, seed: int, display: Callable[[], SftDisplay]) -> Path:
    """All stages, each from the float32 weights that the one before it wrote."""
    model = scratch / "start"
    recipe.write_initial_model(model, seed)
    for stage in recipe.stages:
        display().print_line(f"{stage.name}: {stage.steps} steps")
        rows = scratch / f"{stage.name}.jsonl"
        write_stage_data(stage, rows, seed)
        done = run_sft(build_sft_config(stage, rows, model, scratch, seed), display=display())
        if done.weights is None:
            raise KeyboardInterrupt  # ramify sft ends orderly when it is told to stop, and has no weights then
        model = done.weights
    return model
