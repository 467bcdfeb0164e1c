"""The parser of commands without a configuration: it names an unknown flag and suggests the most similar one."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an unknown flag before it reports missing arguments."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse the first unknown flag; parse the arguments if there is none."""
        self._refuse_unknown_flag(args or ())
        return super().parse_known_args(args, namespace)

    def _refuse_unknown_flag(self, args: Sequence[str]) -> None:
        known = list(self._option_string_actions)
        for arg in args:
            if arg == "--":
                return
            flag = arg.partition("=")[0]
            if not _is_flag(flag) or _is_known(flag, known):
                continue
            nearest = difflib.get_close_matches(flag, known, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else "--help lists the flags"
            self.error(f"unknown flag {flag}; {advice}")


def _is_flag(word: str) -> bool:
    """Whether the word is a flag: -1 and -.5 are numbers."""
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _is_known(flag: str, known: Sequence[str]) -> bool:
    """Whether the flag is known, abbreviated (`--ful`), or a short one with its value (`-oFILE`)."""
    return any(each.startswith(flag) for each in known) if flag.startswith("--") else flag[:2] in known
