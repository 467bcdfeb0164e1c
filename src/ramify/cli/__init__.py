"""The `ramify` command and its subcommands. Help never loads torch, nor any library a command needs."""

from ramify.cli.app import main

__all__ = ["main"]
