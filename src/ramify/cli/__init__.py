"""The `ramify` command and its subcommands. Help loads neither torch nor any other library that a command needs."""

from ramify.cli.app import main

__all__ = ["main"]
