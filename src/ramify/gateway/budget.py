"""Turns and tokens of a rollout, exact also when calls run side by side.

A call takes what it may use before it starts and gives back what it did not use when it ends, so the sum can never
pass a limit. A call that would get less only because others are still running waits for them: what is refused or cut
short is so by what was really used, not by who came first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ramify.errors import BudgetExceeded, ContextOverflow
from ramify.gateway.config import Limits

MOST = 2**20  # tokens of a reply nothing else limits: the server stops it at the end of its context


@dataclass(slots=True, eq=False)
class Grant:
    """What a running call may use: one turn, these context tokens, these sampled ones."""

    input: int
    output: int


class Budget:
    """What is used, and what running calls hold."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counts_input = limits.max_input_tokens is not None or limits.max_total_tokens is not None
        self.turns = self.input = self.output = 0
        self._held: set[Grant] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def exhausted(self) -> str | None:
        """The limit that leaves no further call, if one does."""
        limits = self.limits
        used = {
            "max_turns": (self.turns, limits.max_turns),
            "max_input_tokens": (self.input, limits.max_input_tokens),
            "max_output_tokens": (self.output, limits.max_output_tokens),
            "max_total_tokens": (self.input + self.output, limits.max_total_tokens),
        }
        return next((name for name, (count, most) in used.items() if most is not None and count >= most), None)

    async def take(self, need: Callable[[], int], *, wanted: int, length: int, longest: int | None) -> Grant:
        """What a call gets whose prompt has `length` tokens, `need()` of them new; waits for running calls if it must.

        `wanted` is the most it asks for, `longest` the most tokens the model takes in all.
        """
        while (grant := self._try(need(), wanted, length, longest)) is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._held.add(grant)
        return grant

    def settle(self, grant: Grant, *, turns: int = 0, input: int = 0, output: int = 0) -> None:
        """End a call: what it used is used, the rest is free again."""
        self._held.discard(grant)
        self.turns += turns
        self.input += input
        self.output += output
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def _try(self, need: int, wanted: int, length: int, longest: int | None) -> Grant | None:
        """The grant, or None while only running calls stand in its way; a call that can never run is refused."""
        limits = self.limits
        for name, most in (("seq_len", limits.seq_len), ("the model's length", longest)):
            if most is not None:
                if length >= most:
                    raise ContextOverflow(
                        f"This model's maximum context length is {most} tokens ({name}); the prompt has {length} tokens"
                    )
                wanted = min(wanted, most - length)
        held_in = sum(grant.input for grant in self._held)
        held_out = sum(grant.output for grant in self._held)
        alone = self._room(0, 0, 0, need, wanted)
        beside = self._room(len(self._held), held_in, held_out, need, wanted) if self._held else alone
        if isinstance(alone, str):
            raise BudgetExceeded(alone)
        return Grant(need, alone) if beside == alone else None

    def _room(self, turns: int, input: int, output: int, need: int, wanted: int) -> int | str:
        """How many tokens may be sampled when others hold this much, or what forbids the call."""
        limits = self.limits
        used_in, used_out = self.input + input, self.output + output
        if limits.max_turns is not None and self.turns + turns >= limits.max_turns:
            return f"max_turns: all {limits.max_turns} are used"
        if limits.max_input_tokens is not None and used_in + need > limits.max_input_tokens:
            return f"max_input_tokens: {used_in} of {limits.max_input_tokens} are used, {need} more are needed"
        if limits.max_output_tokens is not None:
            wanted = min(wanted, limits.max_output_tokens - used_out)
            if wanted < 1:
                return f"max_output_tokens: all {limits.max_output_tokens} are used"
        if limits.max_total_tokens is not None:
            wanted = min(wanted, limits.max_total_tokens - used_in - used_out - need)
            if wanted < 1:
                total = used_in + used_out
                return (
                    f"max_total_tokens: {total} of {limits.max_total_tokens} are used, {need} more stand in the prompt"
                )
        return wanted
