r"""Text on its way to the terminal: control characters are shown, not sent.

Models, agents and tasks write much of what commands print. An escape sequence in it could clear the screen, change the
title or fake a line, and a bidirectional override could reorder one. So `main` puts an `EscapingStream` before stdout
and stderr, and `ramify.core.console` escapes what rich draws: no command has to remember it. `\x1b[2J` is printed as
text.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Generator
from types import TracebackType
from typing import Any, TextIO, cast


@contextlib.contextmanager
def hide_log_records(logger_name: str, text: str) -> Generator[None]:
    """Hide the records of a logger whose message contains `text`, while the block runs."""
    logger = logging.getLogger(logger_name)

    def lacks_text(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logger.addFilter(lacks_text)
    try:
        yield
    finally:
        logger.removeFilter(lacks_text)


def format_event(event: str, **fields: object) -> str:
    """Return an event and its fields on one line. A text with spaces or control characters is quoted as JSON."""
    return " ".join([event, *(f"{name}={_format_value(value)}" for name, value in fields.items())])


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and text and " " not in text else json.dumps(text, ensure_ascii=False)


# C0 without tab and newline, DEL and C1, bidirectional controls, line separators, lone surrogates. A carriage return
# is harmless before a newline, and at the start or end of what is written at once, where progress bars have it.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|(?<!^)\r(?!\n|$)"
)


def escape_controls(text: str) -> str:
    r"""Return the text with `\x1b` or `\u202e` in place of each control character."""
    return _CONTROLS.sub(_format_escape, text)


def _format_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"  # JSON has only the second form


class EscapingStream:
    """A text stream that escapes control characters. Consoles of rich write to the stream below it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file: TextIO = get_raw_stream(stream)  # rich looks for this name

    def write(self, text: str) -> int:
        """Write the text without control characters; return the number of characters of the text."""
        self._stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write the lines without control characters."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def get_raw_stream(stream: TextIO) -> TextIO:
    """Return the stream below an EscapingStream, for a library that draws its own progress bars."""
    return getattr(stream, "rich_proxied_file", stream)


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an uncaught exception; an exception may quote a message."""
    with escape_output():
        sys.__excepthook__(kind, error, trace)


@contextlib.contextmanager
def escape_output() -> Generator[None]:
    """Escape control characters in all that is printed to stdout and stderr, while the block runs."""
    stdout, stderr = (cast(TextIO, EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
