"""Keys and values that an earlier version called something else.

A section lists them: `renamed_keys` maps an old key to its new name, `renamed_values` maps old values of a key (by its
new name) to new ones. Files, flags and keywords with an old name are refused with the new one, so each key has one
name. Files that an earlier version stored are still read. What is compared with stored data, such as the identity of a
run, is written with the old names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ramify.config.schema import (
    KeyPath,
    annotation_options,
    default_at,
    element_options,
    format_key,
    get_renamed_keys,
    get_renamed_values,
    is_dict,
    is_list,
    is_list_type,
    is_model_type,
    select_variant,
)


class KeyUpdate:
    """An input table of section `cls` with the new names of its keys, and a message for each old name in it."""

    def __init__(self, cls: type[BaseModel], table: Mapping[str, Any]) -> None:
        self.messages: dict[KeyPath, str] = {}
        self.table: dict[str, Any] = self._update((), [cls], dict(table), None)

    def _update(self, key: KeyPath, options: Sequence[Any], value: Any, default: Any) -> Any:
        if is_list(value):
            elements = [child for option in options if is_list_type(option) for child in element_options(option)]
            return [self._update((*key, index), elements, item, None) for index, item in enumerate(value)]
        cls = _find_section_class(options, value, default)
        return value if cls is None else self._update_section(key, cls, value, default)

    def _update_section(
        self, key: KeyPath, cls: type[BaseModel], table: dict[str, Any], default: Any
    ) -> dict[str, Any]:
        updated: dict[str, Any] = {}
        names, values = get_renamed_keys(cls), get_renamed_values(cls)
        for old_name, item in table.items():
            name, new_item = names.get(old_name, old_name), item
            if isinstance(item, str):
                new_item = values.get(name, {}).get(item, item)
            field = cls.model_fields.get(name)
            if field is not None:
                child_default = default_at(default, [cls], table, name)
                new_item = self._update((*key, old_name), annotation_options(field.annotation), new_item, child_default)
            if name == old_name or name not in table:
                updated[name] = new_item
            old_value = item if isinstance(item, str) and new_item != item else None
            if message := _format_message((*key, old_name), name, old_value, new_item):
                self.messages[*key, old_name] = message
        return updated


def to_new_keys(cls: type[BaseModel], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored table of section `cls` with the new names of its keys and values."""
    return KeyUpdate(cls, table).table


def to_old_keys(cls: type[BaseModel], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of section `cls` with the names that earlier versions stored; subsections are not changed."""
    old_names = {new: old for old, new in get_renamed_keys(cls).items()}
    stored: dict[str, Any] = {}
    for name, value in table.items():
        old_values = {new: old for old, new in get_renamed_values(cls).get(name, {}).items()}
        stored[old_names.get(name, name)] = old_values.get(value, value) if old_values else value
    return stored


def _find_section_class(options: Sequence[Any], value: Any, default: Any) -> type[BaseModel] | None:
    """Return the class of a section; if the value does not select a variant, that of the default."""
    if not is_dict(value):
        return None
    models = [option for option in select_variant(options, value) if is_model_type(option)]
    return next((model for model in models if model is type(default)), models[0] if models else None)


def _format_message(key: KeyPath, name: str, old_value: str | None, new_value: Any) -> str | None:
    value_message = None if old_value is None else f"{old_value!r} is now {new_value!r}"
    if key[-1] != name:
        return f"{format_key(key)} is now called {name}" + (f", and its value {value_message}" if value_message else "")
    return value_message and f"{format_key(key)}: {value_message}"
