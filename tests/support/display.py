"""A display that keeps what it is given."""

from collections.abc import Callable
from typing import Any

from ramify.core.display import Display


class RecordingDisplay(Display[Any]):
    """Keeps its lines and states; `on_refresh` is called with each state."""

    def __init__(self, on_refresh: Callable[[Any], object] = lambda state: None) -> None:
        self.lines: list[str] = []
        self.states: list[Any] = []
        self._on_refresh = on_refresh

    def print_line(self, line: str) -> None:
        self.lines.append(line)

    def refresh(self, state: Any) -> None:
        self.states.append(state)
        self._on_refresh(state)
