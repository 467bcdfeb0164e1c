"""The config class of a plugin: the annotation of its `config` attribute."""

from typing import TypeVar, get_type_hints

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid

C = TypeVar("C", bound=Config)


def get_config_class(plugin: type, base: type[C]) -> type[C]:
    """Return the class in the annotation `config: MyConfig` of the plugin or of a base class."""
    try:
        annotation = get_type_hints(plugin).get("config", base)
    except NameError as error:
        raise ConfigInvalid(f"{plugin.__qualname__}: an annotation cannot be resolved: {error}") from error
    if not (isinstance(annotation, type) and issubclass(annotation, base)):
        raise ConfigInvalid(
            f"{plugin.__qualname__}: config must be annotated with a subclass of {base.__name__}, found {annotation!r}"
        )
    return annotation
