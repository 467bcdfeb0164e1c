"""The console that tables and trees are printed on."""

import sys
from typing import Any

from rich.console import Console

DEFAULT_WIDTH = 120  # columns if stdout is not a terminal


class PipeConsole(Console):
    """A console that raises BrokenPipeError instead of exiting, so that `main` decides the exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError; rich would exit."""
        raise BrokenPipeError


def make_console() -> PipeConsole:
    """Return a console as wide as the terminal, or DEFAULT_WIDTH columns wide without one."""
    return PipeConsole(width=None if sys.stdout.isatty() else DEFAULT_WIDTH)
