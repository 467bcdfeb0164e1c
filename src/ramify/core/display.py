"""Displays of a running command: a live page in a terminal, log lines elsewhere, or nothing.

A command describes only its content: which lines a log gets for a state, and which page a terminal shows for it.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from ramify.core.async_calls import cancel_all
from ramify.core.errors.origin import describe_exception
from ramify.core.interactive import is_interactive
from ramify.core.terminal import escape_controls, escape_output

if TYPE_CHECKING:  # rich is loaded only where something is drawn
    from rich.console import Console, RenderableType
    from rich.table import Table

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class DisplayContent(Protocol[S_contra]):
    """What a command shows of its state. It may remember what it has shown before."""

    def format_lines(self, state: S_contra, /) -> Iterable[str]:
        """Return the lines that a log gets for this state."""
        ...

    def render_page(self, state: S_contra, /) -> "RenderableType":
        """Return the page that a terminal shows for this state."""
        ...


class Display(Generic[S]):
    """Shows the state of a command; a context manager around it. This base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def print_line(self, line: str) -> None:
        """Print a message."""

    def refresh(self, state: S) -> None:
        """Show the current state."""


class LogDisplay(Display[S]):
    """Prints the lines of each state."""

    def __init__(self, content: DisplayContent[S]) -> None:
        self._content = content

    def print_line(self, line: str) -> None:
        """Print a message to stdout."""
        print(escape_controls(line), flush=True)

    def refresh(self, state: S) -> None:
        """Print the lines of the state."""
        for line in self._content.format_lines(state):
            self.print_line(line)


class LiveDisplay(Display[S]):
    """Redraws a page in place; it disappears at the end."""

    def __init__(self, content: DisplayContent[S], console: "Console | None" = None) -> None:
        from rich.live import Live

        from ramify.core.console import PipeConsole

        self._content = content
        self._live = Live(console=console or PipeConsole(), auto_refresh=False, transient=True)
        self._escaping = escape_output()  # of what is printed meanwhile, which rich would parse for colors and links

    def __enter__(self) -> Self:
        self._live.start()
        self._escaping.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._escaping.__exit__(None, None, None)
        self._live.stop()

    def print_line(self, line: str) -> None:
        """Print a message above the page."""
        self._live.console.print(line, markup=False, highlight=False)

    def refresh(self, state: S) -> None:
        """Redraw the page."""
        self._live.update(self._content.render_page(state), refresh=True)


def choose_display(content: DisplayContent[S]) -> Display[S]:
    """Return a live display if stdout is a terminal, else one that prints lines."""
    return LiveDisplay(content) if sys.stdout.isatty() else LogDisplay(content)


def choose_api_display(content: DisplayContent[S]) -> Display[S]:
    """Return the display of a Python call, which shows nothing outside of a terminal and a notebook."""
    return choose_display(content) if is_interactive() else Display()


@contextlib.asynccontextmanager
async def open_display(
    display: Display[S], get_state: Callable[[], Awaitable[S]], interval: float
) -> AsyncGenerator[None]:
    """Enter the display and refresh it every `interval` seconds.

    A failure of the display is printed to stderr at the end: it must not cost the result of the command.
    """

    async def refresh_loop() -> None:
        while True:
            display.refresh(await get_state())
            await asyncio.sleep(interval)

    with display:
        task = asyncio.create_task(refresh_loop(), name="display")
        try:
            yield
        finally:
            error = task.exception() if task.done() and not task.cancelled() else None
            await cancel_all([task])
            if error is not None:
                print(f"the display stopped: {describe_exception(error)}", file=sys.stderr, flush=True)


def make_grid(*titles: str) -> "Table":
    """Return a table without borders, with a first row of titles if there are any."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    if titles:
        table.add_row(*(Text(title, style="dim") for title in titles))
    return table
