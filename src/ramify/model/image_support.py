"""Whether a run's model can be shown images, decided from its name and its engine before anything is loaded."""

from ramify.errors import ModelNotFound, RamifyError
from ramify.images import load_image_family
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
