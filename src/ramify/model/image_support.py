"""What images and the run's model allow together, decided from the model's files before anything is loaded."""

from ramify.core.errors import ModelNotFound, RamifyError
from ramify.model.images import load_image_family
from ramify.model.resolve import resolve_model_path


def find_image_problem(model: str, engine: str) -> str | None:
    """Return why a model cannot be shown images; None if it can, or if its files are not on this machine."""
    needed = "needs a model that takes images"
    if engine == "vllm":
        return f"{needed}; images are not sent to vLLM: set inference.engine to 'native'"
    try:
        family = load_image_family(resolve_model_path(model))
    except ModelNotFound:
        return None
    except RamifyError as error:
        return f"{needed}; {error.message}"
    return f"{needed}; {model} is a text model: set model.name to another one" if family is None else None


def find_rank_problem(model: str, num_ranks: int) -> str | None:
    """Return why a model cannot be trained by this many ranks; None if it can, or if its files are not here."""
    if num_ranks == 1 or not is_vision_model(model):
        return None
    return f"{model} is a vision-language model, which is trained by one rank, got {num_ranks}; set it to 1"


def is_vision_model(model: str) -> bool:
    """Return whether a model takes images; False if it is unsupported, or if its files are not on this machine."""
    try:
        return load_image_family(resolve_model_path(model)) is not None
    except RamifyError:
        return False
