"""Image families: how the images of one kind of vision-language model are processed and stand in a prompt."""

import json
from pathlib import Path
from typing import Any, Protocol, cast

from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.model.images.processed_image import ImageLayout, ProcessedImage
from ramify.trace import Media

REFUSED_FAMILIES = {
    "gemma3": "its tokens attend to later tokens of the same image, which a tree with causal attention cannot express",
}
VISION_KEYS = ("vision_config", "image_token_id", "image_token_index")  # keys that only vision-language models have


class ImageFamily(Protocol):
    """The images of one model.

    - `name`: the name of the family.
    - `image_token_id`: the token that gets an embedding of the image, once per embedding.
    - `marker`: its text, which a chat template writes once for an image.
    """

    name: str
    image_token_id: int
    marker: str

    def process(self, media: Media) -> ProcessedImage:
        """Return the model's inputs for an image. Raises ImageInvalid."""
        ...

    def placeholder_text(self, layout: ImageLayout) -> str:
        """Return the text that replaces the marker: image tokens, and the separators of tiles if there are any.

        Only the tokens `image_token_id` of this text get embeddings, in order.
        """
        ...


def load_image_family(model_dir: Path | str) -> ImageFamily | None:
    """Return the image family of a model directory, or None if the model takes no images.

    Raises ModelUnsupported if the model takes images but its family is not supported.
    """
    directory = Path(model_dir)
    config = read_model_json(directory / "config.json")
    model_type = str(config.get("model_type", ""))
    if not any(key in config for key in VISION_KEYS):
        return None
    processor = read_model_json(directory / "processor_config.json")
    image_processor = read_model_json(directory / "preprocessor_config.json") or processor.get("image_processor", {})
    if model_type in ("idefics3", "smolvlm"):
        from ramify.model.images.idefics3 import Idefics3Family

        return Idefics3Family(config, image_processor, processor)
    if model_type == "qwen3_vl":
        from ramify.model.images.qwen3_vl import Qwen3VLFamily

        return Qwen3VLFamily(config, image_processor)
    reason = next((text for prefix, text in REFUSED_FAMILIES.items() if model_type.startswith(prefix)), None)
    raise ModelUnsupported(
        f"images of {model_type!r} models are not supported"
        + (f": {reason}" if reason else "; supported are idefics3, smolvlm and qwen3_vl")
    )


def read_model_json(path: Path) -> dict[str, Any]:
    """Read one of a model's JSON files; a missing file counts as empty. Raises ConfigInvalid if it is not JSON."""
    try:
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"model: {path} is not JSON: {error}") from error
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
