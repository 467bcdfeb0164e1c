"""The console that pages, tables and trees are printed on."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ramify.core.terminal import escape_controls

DEFAULT_WIDTH = 120  # columns if stdout is not a terminal


class PipeConsole(Console):
    """A console that raises BrokenPipeError instead of exiting, so that `main` decides the exit code.

    Texts are printed as they are: without markup, and with control characters escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable. Only rich's own control codes stay as they are."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; rich would exit."""
        raise BrokenPipeError


def make_console() -> PipeConsole:
    """Return a console as wide as the terminal, or DEFAULT_WIDTH columns wide without one."""
    return PipeConsole(width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
