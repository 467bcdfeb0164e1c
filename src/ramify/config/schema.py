"""What a configuration model allows at a key, read from its annotations alone.

An annotation is seen as its list of *options*: unions are flattened, so `Elastic | Static | None` is three options and
an `int` is one. Walking a key maps options to options. This serves two readers: flags need to know what kind of value
a key takes before there is a value, and errors need to know which keys would have been right.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

TAG_KEYS = ("type", "engine")  # the keys that pick a variant of a closed union

KeyPath = tuple[str | int, ...]


def format_key(key: Iterable[str | int]) -> str:
    """The key as people write it: `train.0.pool.min`."""
    return ".".join(map(str, key))


def is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a table."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether a value is a tuple, as a default may be."""
    return isinstance(value, tuple)


def has_key(container: Any, key: str | int) -> bool:
    """Whether a table or list holds something at `key`; a plain value holds nothing."""
    if is_list(container):
        return isinstance(key, int) and key < len(container)
    return is_dict(container) and key in container


def annotation_options(annotation: Any) -> list[Any]:
    """The alternatives of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return annotation_options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for arm in get_args(annotation) for option in annotation_options(arm)]
    return [NoneType if annotation is None else annotation]


def is_model_type(option: Any) -> TypeGuard[type[BaseModel]]:
    """Whether the option is a section."""
    return isinstance(option, type) and issubclass(option, BaseModel)


def is_list_type(option: Any) -> bool:
    """Whether the option is a list; a tuple is written as one."""
    return (get_origin(option) or option) in (list, tuple)


def is_dict_type(option: Any) -> bool:
    """Whether the option is a free table, of keys the schema does not know."""
    return (get_origin(option) or option) is dict


def accepts_anything(option: Any) -> bool:
    """Whether anything is allowed."""
    return option is Any or option is object


def is_container(option: Any) -> bool:
    """Whether something can lie below the option."""
    return is_model_type(option) or is_list_type(option) or is_dict_type(option) or accepts_anything(option)


def element_options(option: Any) -> list[Any]:
    """The options of an entry of this list, or of a value of this free table."""
    arguments = [argument for argument in get_args(option) if argument is not ...]
    return annotation_options(arguments[-1]) if arguments else [Any]


def child_options(options: Sequence[Any], key: str | int) -> list[Any]:
    """The options of what lies under `key`; none if nothing is allowed there."""
    found: list[Any] = []
    for kind in options:
        if is_model_type(kind):
            field = kind.model_fields.get(str(key))
            if field is not None:
                found += annotation_options(field.annotation)
            elif kind.model_config.get("extra") == "allow":
                found.append(Any)
        elif is_list_type(kind) or is_dict_type(kind):
            found += element_options(kind)
        elif accepts_anything(kind):
            found.append(Any)
    return found


def select_variant(options: Sequence[Any], table: Any) -> list[Any]:
    """The options that remain once the table has named its variant; all of them while it has not."""
    named: dict[str, Any] = table if is_dict(table) else {}
    chosen = [kind for kind in options if is_model_type(kind) and named.get(model_tag_key(kind)) in _model_tags(kind)]
    return chosen or list(options)


def section_keys(options: Sequence[Any]) -> list[str]:
    """The keys that a section of these kinds may have."""
    return list(dict.fromkeys(name for kind in options if is_model_type(kind) for name in kind.model_fields))


def variant_tags(options: Sequence[Any]) -> list[Any]:
    """The variants a closed union offers, by their tag."""
    return [tag for kind in options if is_model_type(kind) for tag in _model_tags(kind)]


def iter_keys(cls: type[BaseModel]) -> Iterator[KeyPath]:
    """All keys of the schema, the shallow ones first; an entry of a list is shown as entry 0."""
    queue: deque[tuple[KeyPath, list[Any], tuple[Any, ...]]] = deque([((), [cls], ())])
    while queue:
        key, kinds, above = queue.popleft()
        for kind in kinds:
            if is_list_type(kind):
                queue.append(((*key, 0), element_options(kind), above))
            elif is_model_type(kind) and kind not in above:
                for name, field in kind.model_fields.items():
                    yield (*key, name)
                    queue.append(((*key, name), annotation_options(field.annotation), (*above, kind)))


def union_tag_key(options: Sequence[Any]) -> str:
    """The key by which a closed union tells its variants apart."""
    return next((model_tag_key(kind) for kind in options if is_model_type(kind)), TAG_KEYS[0])


def model_tag_key(model: type[BaseModel]) -> str:
    """The key that tells this variant from the others."""
    return next((key for key in TAG_KEYS if _literal_values(model, key)), TAG_KEYS[0])


def _model_tags(model: type[BaseModel]) -> tuple[Any, ...]:
    return _literal_values(model, model_tag_key(model))


def _literal_values(model: type[BaseModel], key: str) -> tuple[Any, ...]:
    field = model.model_fields.get(key)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
