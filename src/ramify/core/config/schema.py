"""What a configuration model allows at a key, derived from its annotations.

An annotation is represented by its list of *options*: unions are flattened, so `Elastic | Static | None` has three
options and `int` has one. `child_options` maps the options of a section to the options of a key in it. Flags use this
to find the type of a key before there is a value; error messages use it to suggest valid keys.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

TAG_KEYS = ("type", "engine")  # the keys that select a variant of a discriminated union

KeyPath = tuple[str | int, ...]


def format_key(key: Iterable[str | int]) -> str:
    """Return the key in dotted form, such as `train.0.pool.min`."""
    return ".".join(map(str, key))


def parse_key(text: str) -> KeyPath:
    """Return the key of its dotted form."""
    return tuple(int(part) if part.isdecimal() else part for part in text.split(".") if part)


def is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a table."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Return whether a value is a tuple, as a default may be."""
    return isinstance(value, tuple)


def has_key(container: Any, key: str | int) -> bool:
    """Return whether `container` is a table or list that has an entry at `key`."""
    if is_list(container):
        return isinstance(key, int) and key < len(container)
    return is_dict(container) and key in container


def has_key_path(container: Any, key: KeyPath) -> bool:
    """Return whether nested tables and lists have an entry at `key`."""
    for part in key:
        if not has_key(container, part):
            return False
        container = container[part]
    return True


def annotation_options(annotation: Any) -> list[Any]:
    """Return the options of an annotation: the members of a union, or the annotation itself."""
    origin: Any = get_origin(annotation)
    if origin is Annotated:
        return annotation_options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for member in get_args(annotation) for option in annotation_options(member)]
    return [NoneType if annotation is None else annotation]


def is_model_type(option: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether the option is a section."""
    return isinstance(option, type) and issubclass(option, BaseModel)


def is_list_type(option: Any) -> bool:
    """Return whether the option is a list or a tuple, which TOML writes as a list."""
    return (get_origin(option) or option) in (list, tuple)


def is_dict_type(option: Any) -> bool:
    """Return whether the option is a table with arbitrary keys."""
    return (get_origin(option) or option) is dict


def accepts_anything(option: Any) -> bool:
    """Return whether the option allows any value."""
    return option is Any or option is object


def is_container(option: Any) -> bool:
    """Return whether a value of the option can have keys or entries."""
    return is_model_type(option) or is_list_type(option) or is_dict_type(option) or accepts_anything(option)


def element_options(option: Any) -> list[Any]:
    """Return the options of an entry of a list type, or of a value of a dict type."""
    arguments = [argument for argument in get_args(option) if argument is not ...]
    return annotation_options(arguments[-1]) if arguments else [Any]


def child_options(options: Sequence[Any], key: str | int) -> list[Any]:
    """Return the options at `key` of a section, table or list; an empty list if the schema has no such key."""
    children: list[Any] = []
    for option in options:
        if is_model_type(option):
            field = option.model_fields.get(str(key))
            if field is not None:
                children += annotation_options(field.annotation)
        elif is_dict_type(option) or (is_list_type(option) and str(key).isdecimal()):
            children += element_options(option)
        elif accepts_anything(option):
            children.append(Any)
    return children


def select_variant(options: Sequence[Any], table: Any) -> list[Any]:
    """Return the options that match the variant which the table names; all of them if it names none."""
    data: dict[str, Any] = table if is_dict(table) else {}
    models = (option for option in options if is_model_type(option))
    return [model for model in models if data.get(model_tag_key(model)) in _model_tags(model)] or list(options)


def section_keys(options: Sequence[Any]) -> list[str]:
    """Return the keys of the sections among the options."""
    return list(dict.fromkeys(name for option in options if is_model_type(option) for name in option.model_fields))


def variant_tags(options: Sequence[Any]) -> list[Any]:
    """Return the tags of the variants among the options."""
    return [tag for option in options if is_model_type(option) for tag in _model_tags(option)]


def iter_keys(cls: type[BaseModel]) -> Iterator[KeyPath]:
    """Yield all keys of the schema, breadth first; an entry of a list has index 0.

    Where one section or a list of sections is allowed, the keys are as for one section.
    """
    queue: deque[tuple[KeyPath, list[Any], tuple[Any, ...]]] = deque([((), [cls], ())])
    while queue:
        key, options, ancestors = queue.popleft()
        for option in options:
            if is_list_type(option) and not set(element_options(option)) & set(options):
                queue.append(((*key, 0), element_options(option), ancestors))
            elif is_model_type(option) and option not in ancestors:
                for name, field in option.model_fields.items():
                    yield (*key, name)
                    queue.append(((*key, name), annotation_options(field.annotation), (*ancestors, option)))


def union_tag_key(options: Sequence[Any]) -> str:
    """Return the key that selects a variant among the options."""
    return next((model_tag_key(option) for option in options if is_model_type(option)), TAG_KEYS[0])


def model_tag_key(model: type[BaseModel]) -> str:
    """Return the key whose value identifies this variant of a union."""
    return next((key for key in TAG_KEYS if _literal_values(model, key)), TAG_KEYS[0])


def default_at(section_default: Any, options: Sequence[Any], table: Any, name: str) -> Any:
    """Return the default value of `name`, from the section instance if it has one, else from its class."""
    if isinstance(section_default, BaseModel):
        key = model_tag_key(type(section_default))
        tag = getattr(section_default, key, None)
        if table.get(key, tag) == tag:
            return getattr(section_default, name, None)
    fields = (option.model_fields[name] for option in options if is_model_type(option) and name in option.model_fields)
    return next(map(get_field_default, fields), None)


def get_field_default(field: FieldInfo) -> Any:
    """Return the default value of a field; None if it is computed from the values of other fields."""
    if field.default_factory_takes_validated_data:
        return None
    return field.get_default(call_default_factory=True, validated_data=None)


def get_misplaced_keys(model: type[BaseModel]) -> dict[str, str]:
    """Return where each key belongs that users write in a section by mistake, relative to the section."""
    classes = reversed(model.__mro__)
    return {key: place for cls in classes for key, place in vars(cls).get("misplaced_keys", {}).items()}


def _model_tags(model: type[BaseModel]) -> tuple[Any, ...]:
    return _literal_values(model, model_tag_key(model))


def _literal_values(model: type[BaseModel], key: str) -> tuple[Any, ...]:
    field = model.model_fields.get(key)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
