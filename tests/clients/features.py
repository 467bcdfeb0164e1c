"""What the checks of SDKs share: a tool, a schema, and one line of output for each feature that works.

The checks run in environments of their own, so this module imports only the standard library. A value of the tool or
the schema is one of a few words: a model that was never trained on them then ends its reply after a few tokens.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

MODEL = "tiny"
CITIES = ["Paris", "Rome"]
QUESTION = "What is the weather in Paris?"
MAX_TOKENS = 256  # the grammar allows some whitespace between the parts of JSON
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "is_sunny": {"type": "boolean"}},
    "required": ["city", "is_sunny"],
    "additionalProperties": False,
}
TOOL_NAME = "get_weather"
TOOL_DESCRIPTION = "Return the weather of a city."
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}


class FeatureReport:
    """The features of one client. `run.py` reads the lines that it prints."""

    def __init__(self) -> None:
        self._has_failed = False

    @contextlib.contextmanager
    def check(self, client: str, feature: str) -> Iterator[None]:
        """Print whether the block succeeds."""
        result = "passed"
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the table shows it, and the other features are checked too
            traceback.print_exc()
            self._has_failed, result = True, f"FAILED: {type(error).__name__}"
        print(f"\nfeature | {client} | {feature} | {result}", flush=True)  # a client may have left a line open

    def finish(self) -> None:
        """End the process; the status is 1 if a feature failed."""
        sys.exit(1 if self._has_failed else 0)


def check_city(arguments: Any) -> None:
    """Assert that a tool was called with one of the cities."""
    assert isinstance(arguments, dict) and arguments.get("city") in CITIES, arguments


def check_weather(value: Any) -> None:
    """Assert that a value follows the schema."""
    assert isinstance(value, dict) and set(value) == {"city", "is_sunny"}, value
    assert value["city"] in CITIES and isinstance(value["is_sunny"], bool), value
