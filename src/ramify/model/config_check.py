"""Refusing a model by its config, before its weights are downloaded and before anything starts.

Importable without torch, which is only loaded for families that may be refused.
"""

from pathlib import Path

from ramify.core.errors import ModelNotFound
from ramify.core.hub import is_hub_id
from ramify.model.resolve import fetch_config, read_model_config, resolve_config_path

# Families that are never refused by an ordinary config, so a plan need not import transformers.
ALWAYS_SUPPORTED = {"llama", "mistral", "qwen2", "qwen3", "qwen3_vl", "smolvlm", "idefics3"}


def check_model_config(
    name: str, *, by_trainer: bool, by_engine: bool, fetch: bool, skip_without_transformers: bool
) -> None:
    """Raise ModelUnsupported if the config of a model shows that the trainer or the native engine refuses it.

    With `fetch`, the config of a hub id is downloaded. A model that is not found is not checked. With
    `skip_without_transformers`, the check is skipped if transformers is not installed.
    """
    if not (by_trainer or by_engine):
        return
    try:
        directory = fetch_config(name) if is_hub_id(name) and fetch else resolve_config_path(name)
    except ModelNotFound:  # which is another problem
        return
    if is_always_supported(directory):
        return
    try:
        from ramify.model.support import check_model_supported  # transformers, and with it torch: seconds
    except ImportError:
        if skip_without_transformers:
            return
        raise
    check_model_supported(directory, by_trainer=by_trainer, by_engine=by_engine)


def is_always_supported(model_dir: Path) -> bool:
    """Return whether no ordinary config of the model's family is refused; False if the config is unreadable."""
    config = read_model_config(model_dir)
    return str(config.get("model_type")) in ALWAYS_SUPPORTED and "quantization_config" not in config
