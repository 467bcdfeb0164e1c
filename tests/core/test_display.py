"""Displays of a running command."""

import asyncio
import io

from rich.console import Console
from rich.text import Text

from ramify.core.display import Display, LiveDisplay, LogDisplay, choose_display, open_display
from tests.support.display import RecordingDisplay


class CountContent:
    """Prints even numbers, and draws every number."""

    def format_lines(self, number):
        return [f"number={number}"] if number % 2 == 0 else []

    def render_page(self, number):
        return Text(f"page {number}")


def test_log_display_prints_the_lines_of_its_content(capsys):
    with choose_display(CountContent()) as display:
        assert isinstance(display, LogDisplay)
        for number in range(3):
            display.refresh(number)
        display.print_line("[b]end")
    assert capsys.readouterr().out.splitlines() == ["number=0", "number=2", "[b]end"]


def test_live_display_draws_the_page_of_its_content():
    file = io.StringIO()
    with LiveDisplay(CountContent(), Console(file=file, width=40, force_terminal=True)) as display:
        display.refresh(7)
        display.print_line("[b]message")
    assert "page 7" in file.getvalue()
    assert "[b]message" in file.getvalue()


def test_open_display_refreshes_until_it_is_left():
    reached = asyncio.Event()
    display = RecordingDisplay(lambda state: reached.set() if state == 3 else None)

    async def get_state():
        return len(display.states) + 1

    async def run():
        async with open_display(display, get_state, 0.0), asyncio.timeout(30):
            await reached.wait()

    asyncio.run(run())
    assert display.states[:3] == [1, 2, 3]


def test_a_failed_refresh_is_reported_when_the_display_is_left(capsys):
    async def get_state():
        raise ValueError("no state")

    async def run():
        async with open_display(Display(), get_state, 0.0):
            await asyncio.sleep(0)
            return "the result is kept"

    assert asyncio.run(run()) == "the result is kept"
    assert "the display stopped: ValueError: no state" in capsys.readouterr().err
