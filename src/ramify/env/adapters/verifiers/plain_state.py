"""Rows of datasets and states of rollouts as plain data."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from ramify.core.errors import ConfigInvalid


def to_plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a dataset as plain data. Raises ConfigInvalid, which names the column that cannot be."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[name] = _to_plain(value)
        except (TypeError, ValueError) as error:
            raise ConfigInvalid(f"the column {name!r} of the dataset has a {type(value).__name__}: {error}") from error
    return plain


def keep_plain_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a state that are plain data; others are left out."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        with contextlib.suppress(TypeError, ValueError):
            plain[name] = _to_plain(value)
    return plain


def _to_plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_dump_model, allow_nan=False))


def _dump_model(value: Any) -> Any:
    """Return a pydantic model, such as a message of verifiers, as a dict."""
    if not hasattr(value, "model_dump"):
        raise TypeError(f"{type(value).__name__} is no plain data")
    return value.model_dump(mode="json", exclude_none=True)
