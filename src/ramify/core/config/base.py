"""The base class of every configuration model: unknown keys are errors, and input is merged over defaults.

Pydantic takes a section either entirely from its default or entirely from the input. With `optim: Optim =
Optim(lr=3e-4)`, a file that sets only `optim.warmup_steps` would silently reset `lr` to the default of the class. Here
the input is merged over the default, as it is merged over an earlier file: keys that the default sets explicitly stay
unless the input sets them.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from ramify.core.config.schema import KeyPath, annotation_options, get_field_default, is_dict, model_tag_key
from ramify.core.errors import ConfigProblem

NONE_LITERAL = "None"  # None in a TOML file, which has no null


def _run_name_stays_below_output(name: str) -> str:
    path = PurePath(name)
    if name and (not path.parts or path.is_absolute() or ".." in path.parts):
        raise ValueError(f"expected the name of a directory below `output`, got {name!r}")
    return name


RunName = Annotated[str, AfterValidator(_run_name_stays_below_output)]
"""The name of a run's directory below `output`; "" where the command has a default name."""


def _address_has_host_and_port(address: str, *, scheme: str) -> str:
    try:
        url = urlsplit(address)
        is_valid = url.scheme == scheme and bool(url.hostname) and url.port is not None
    except ValueError:  # the port is not a number
        is_valid = False
    if not is_valid:
        raise ValueError(f"expected {scheme}://HOST:PORT (port 0 takes a free one), got {address!r}")
    return address


TcpAddress = Annotated[str, AfterValidator(partial(_address_has_host_and_port, scheme="tcp"))]
HttpAddress = Annotated[str, AfterValidator(partial(_address_has_host_and_port, scheme="http"))]


class SectionProblems(ValueError):
    """All problems of a section, for pydantic, which collects the errors of all sections."""

    def __init__(self, *problems: tuple[str, str]) -> None:
        self.problems = [ConfigProblem(*problem) for problem in problems]
        super().__init__("; ".join(map(str, self.problems)))


class Config(BaseModel):
    """Base class of configuration tables: a pydantic model that refuses unknown keys and infinite numbers.

    - `misplaced_keys`: where keys of a plugin's table belong that users write in this section, for suggestions.
    - `switch`: the key with which a default turns the section off, such as `lora: Lora = Lora(enabled=False)`. As soon
      as a file or flag sets any part of the section, the default value of this key no longer applies.
    - `common_keys`: the keys that people set, with which the help page of a command begins.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)  # infinite timeouts are not allowed

    misplaced_keys: ClassVar[Mapping[str, str]] = {}
    switch: ClassVar[str | None] = None
    common_keys: ClassVar[Sequence[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _merge_over_defaults(cls, data: Any) -> Any:
        if not is_dict(data):
            return data
        for key, value in data.items():
            if isinstance(value, str | PurePath) and "\0" in str(value):
                raise SectionProblems((key, f"a NUL character is not allowed, found {str(value)!r}; remove it"))
        fields = cls.model_fields
        return {key: _fill_from_default(fields[key], value) if key in fields else value for key, value in data.items()}

    @classmethod
    def find_given_key(cls, key: KeyPath, data: Any) -> KeyPath:
        """Return the key under which `data` has the value that is refused at `key`: another one if it is inherited."""
        section = cls.model_fields[key[0]].annotation if key and key[0] in cls.model_fields else None
        if isinstance(section, type) and issubclass(section, Config) and is_dict(data):
            return (key[0], *section.find_given_key(key[1:], data.get(str(key[0]))))
        return key

    def find_problems(self) -> Iterable[tuple[str, str]]:
        """Yield each rule that the values break together, as the key of a value below this section and a text."""
        return ()

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if problems := list(self.find_problems()):
            raise SectionProblems(*problems)
        return self


def get_explicit_values(config: Config) -> dict[str, Any]:
    """Return the keys that were set explicitly, so that a new configuration can be built from them and others."""
    return {key: getattr(config, key) for key in config.model_fields_set}


def expand_model_name(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with `model = "tiny"` expanded to `model = {name = "tiny"}`."""
    model = table.get("model")
    return {**table, "model": {"name": model}} if isinstance(model, str) else dict(table)


def merge_tables(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `override` on top, recursively; neither argument is changed."""
    merged = copy.deepcopy(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = merge_tables(old, value) if is_dict(old) and is_dict(value) else copy.deepcopy(value)
    return merged


def _fill_from_default(field: FieldInfo, value: Any) -> Any:
    """Return `value` with the keys that only the field's default sets."""
    if value == NONE_LITERAL and {NoneType, Any, object} & set(annotation_options(field.annotation)):
        return None
    default = get_field_default(field) if is_dict(value) else None
    if not isinstance(default, BaseModel):
        return value
    key = model_tag_key(type(default))
    tag = {key: getattr(default, key)} if key in type(default).model_fields else {}
    if value.get(key, tag.get(key)) != tag.get(key):
        return value  # another variant: the default does not apply
    switch = {default.switch} if isinstance(default, Config) and default.switch else set[str]()
    return merge_tables({**default.model_dump(exclude_unset=True, exclude=switch), **tag}, value)
