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

TAGS = ("type", "engine")  # the keys that pick a variant of a closed union

Key = tuple[str | int, ...]


def dotted(key: Iterable[str | int]) -> str:
    """The key as people write it: `train.0.pool.min`."""
    return ".".join(map(str, key))


def is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a table."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether a value is a tuple, as a default may be."""
    return isinstance(value, tuple)


def has(holder: Any, key: str | int) -> bool:
    """Whether a table or list holds something at `key`; a plain value holds nothing."""
    if is_array(holder):
        return isinstance(key, int) and key < len(holder)
    return is_dict(holder) and key in holder


def options(annotation: Any) -> list[Any]:
    """The alternatives of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [option for arm in get_args(annotation) for option in options(arm)]
    return [NoneType if annotation is None else annotation]


def is_model(option: Any) -> TypeGuard[type[BaseModel]]:
    """Whether the option is a section."""
    return isinstance(option, type) and issubclass(option, BaseModel)


def is_list(option: Any) -> bool:
    """Whether the option is a list; a tuple is written as one."""
    return (get_origin(option) or option) in (list, tuple)


def is_table(option: Any) -> bool:
    """Whether the option is a free table, of keys the schema does not know."""
    return (get_origin(option) or option) is dict


def is_free(option: Any) -> bool:
    """Whether anything is allowed."""
    return option is Any or option is object


def is_container(option: Any) -> bool:
    """Whether something can lie below the option."""
    return is_model(option) or is_list(option) or is_table(option) or is_free(option)


def element(option: Any) -> list[Any]:
    """The options of an entry of this list, or of a value of this free table."""
    arguments = [argument for argument in get_args(option) if argument is not ...]
    return options(arguments[-1]) if arguments else [Any]


def step(kinds: Sequence[Any], key: str | int) -> list[Any]:
    """The options of what lies under `key`; none if nothing is allowed there."""
    found: list[Any] = []
    for kind in kinds:
        if is_model(kind):
            field = kind.model_fields.get(str(key))
            if field is not None:
                found += options(field.annotation)
            elif kind.model_config.get("extra") == "allow":
                found.append(Any)
        elif is_list(kind) or is_table(kind):
            found += element(kind)
        elif is_free(kind):
            found.append(Any)
    return found


def variant(kinds: Sequence[Any], table: Any) -> list[Any]:
    """The options that remain once the table has named its variant; all of them while it has not."""
    named: dict[str, Any] = table if is_dict(table) else {}
    chosen = [kind for kind in kinds if is_model(kind) and named.get(tag_key(kind)) in _tags(kind)]
    return chosen or list(kinds)


def siblings(kinds: Sequence[Any]) -> list[str]:
    """The keys that a section of these kinds may have."""
    return list(dict.fromkeys(name for kind in kinds if is_model(kind) for name in kind.model_fields))


def tags(kinds: Sequence[Any]) -> list[Any]:
    """The variants a closed union offers, by their tag."""
    return [tag for kind in kinds if is_model(kind) for tag in _tags(kind)]


def every_key(cls: type[BaseModel]) -> Iterator[Key]:
    """All keys of the schema, the shallow ones first; an entry of a list is shown as entry 0."""
    queue: deque[tuple[Key, list[Any], tuple[Any, ...]]] = deque([((), [cls], ())])
    while queue:
        key, kinds, above = queue.popleft()
        for kind in kinds:
            if is_list(kind):
                queue.append(((*key, 0), element(kind), above))
            elif is_model(kind) and kind not in above:
                for name, field in kind.model_fields.items():
                    yield (*key, name)
                    queue.append(((*key, name), options(field.annotation), (*above, kind)))


def tag_of(kinds: Sequence[Any]) -> str:
    """The key by which a closed union tells its variants apart."""
    return next((tag_key(kind) for kind in kinds if is_model(kind)), TAGS[0])


def tag_key(kind: type[BaseModel]) -> str:
    """The key that tells this variant from the others."""
    return next((key for key in TAGS if _literals(kind, key)), TAGS[0])


def _tags(kind: type[BaseModel]) -> tuple[Any, ...]:
    return _literals(kind, tag_key(kind))


def _literals(kind: type[BaseModel], key: str) -> tuple[Any, ...]:
    field = kind.model_fields.get(key)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
