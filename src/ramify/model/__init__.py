"""Models: where they are found, how they are loaded, how their attention reads a paged cache, how weights travel.

One idea: a model is an ordinary Hugging Face directory, run by its own code. What Ramify adds is an attention function,
registered where transformers offers a place for it, and a manifest that gives a set of weights a name. Names load when
they are used: resolving a model or reading a version needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.model.load import LoadedModel as LoadedModel
    from ramify.model.manifest import Manifest as Manifest
    from ramify.model.version import Version as Version
    from ramify.model.weights import publish as publish

_FACE = {
    "LoadedModel": "ramify.model.load",
    "Manifest": "ramify.model.manifest",
    "Version": "ramify.model.version",
    "publish": "ramify.model.weights",
}

__all__ = ["LoadedModel", "Manifest", "Version", "publish"]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.model' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
