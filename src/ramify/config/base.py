"""The base of every configuration model: unknown keys are errors, and a default is a layer like any other.

Pydantic takes a section either whole from its default or whole from the input. With `optim: Optim = Optim(lr=3e-4)` a
file that sets only `optim.warmup_steps` would silently put `lr` back to the default of the class. Here the input lies
*over* the default, as it lies over an earlier file: what the default set explicitly stays unless it is set again.
"""

import copy
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from ramify.config.schema import annotation_options, is_dict, model_tag_key

NONE_LITERAL = "None"  # how a TOML file, which has no null, says None


def _run_name_stays_below_output(name: str) -> str:
    path = PurePath(name)
    if name and (not path.parts or path.is_absolute() or ".." in path.parts):
        raise ValueError(f"expected the name of a directory below `output`, got {name!r}")
    return name


RunName = Annotated[str, AfterValidator(_run_name_stays_below_output)]
"""The name of a run's directory, or nothing where it has a default."""


class Config(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)  # a wait for ever is none that has a deadline

    @model_validator(mode="before")
    @classmethod
    def _merge_over_defaults(cls, data: Any) -> Any:
        if not is_dict(data):
            return data
        fields = cls.model_fields
        return {key: _fill_from_default(fields[key], value) if key in fields else value for key, value in data.items()}


def merge_tables(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, table by table; both are left as they are."""
    merged = copy.deepcopy(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = merge_tables(below, value) if is_dict(below) and is_dict(value) else copy.deepcopy(value)
    return merged


def _fill_from_default(field: FieldInfo, value: Any) -> Any:
    """`value` with what the field's default says where the value is silent."""
    if value == NONE_LITERAL and {NoneType, Any, object} & set(annotation_options(field.annotation)):
        return None
    if not is_dict(value) or field.default_factory_takes_validated_data:
        return value
    default: Any = field.get_default(call_default_factory=True, validated_data=None)
    if not isinstance(default, BaseModel):
        return value
    key = model_tag_key(type(default))
    tag = {key: getattr(default, key)} if key in type(default).model_fields else {}
    if value.get(key, tag.get(key)) != tag.get(key):
        return value  # another variant: the default has nothing to say about it
    return merge_tables({**default.model_dump(exclude_unset=True), **tag}, value)
