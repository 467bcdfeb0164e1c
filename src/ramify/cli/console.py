"""Where tables and trees are printed."""

from rich.console import Console


class PipeConsole(Console):
    """A console that leaves it to the command line what becomes of a reader who has left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
