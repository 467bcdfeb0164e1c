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
from ramify.gateway.config import RolloutLimits

NO_TOKEN_LIMIT = 2**20  # tokens of a reply nothing else limits: the server stops it at the end of its context


@dataclass(slots=True, eq=False)
class BudgetGrant:
    """What a running call may use: one turn, these context tokens, these sampled ones."""

    input_tokens: int
    output_tokens: int


class RolloutBudget:
    """What is used, and what running calls hold."""

    def __init__(self, limits: RolloutLimits) -> None:
        self.limits = limits
        self.limits_input = limits.max_input_tokens is not None or limits.max_total_tokens is not None
        self.num_turns = self.input_tokens = self.output_tokens = 0
        self._grants: set[BudgetGrant] = set()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def exhausted_limit(self) -> str | None:
        """The limit that leaves no further call, if one does."""
        limits = self.limits
        used = {
            "max_turns": (self.num_turns, limits.max_turns),
            "max_input_tokens": (self.input_tokens, limits.max_input_tokens),
            "max_output_tokens": (self.output_tokens, limits.max_output_tokens),
            "max_total_tokens": (self.input_tokens + self.output_tokens, limits.max_total_tokens),
        }
        return next((name for name, (count, most) in used.items() if most is not None and count >= most), None)

    async def reserve(
        self, count_new_tokens: Callable[[], int], *, max_tokens: int, prompt_len: int, max_model_len: int | None
    ) -> BudgetGrant:
        """What a call gets whose prompt has `length` tokens, `need()` of them new; waits for running calls if it must.

        `wanted` is the most it asks for, `longest` the most tokens the model takes in all.
        """
        while (grant := self._try_reserve(count_new_tokens(), max_tokens, prompt_len, max_model_len)) is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(turn)
            await turn
        self._grants.add(grant)
        return grant

    def release(self, grant: BudgetGrant, *, num_turns: int = 0, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """End a call: what it used is used, the rest is free again."""
        self._grants.discard(grant)
        self.num_turns += num_turns
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        waiting, self._waiters = self._waiters, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def _try_reserve(
        self, new_tokens: int, max_tokens: int, prompt_len: int, max_model_len: int | None
    ) -> BudgetGrant | None:
        """The grant, or None while only running calls stand in its way; a call that can never run is refused."""
        limits = self.limits
        for name, most in (("seq_len", limits.seq_len), ("the model's length", max_model_len)):
            if most is not None:
                if prompt_len >= most:
                    raise ContextOverflow(
                        f"This model's maximum context length is {most} tokens ({name}); the prompt "
                        f"has {prompt_len} tokens"
                    )
                max_tokens = min(max_tokens, most - prompt_len)
        held_in = sum(grant.input_tokens for grant in self._grants)
        held_out = sum(grant.output_tokens for grant in self._grants)
        alone = self._allowed_output_tokens(0, 0, 0, new_tokens, max_tokens)
        beside = (
            self._allowed_output_tokens(len(self._grants), held_in, held_out, new_tokens, max_tokens)
            if self._grants
            else alone
        )
        if isinstance(alone, str):
            raise BudgetExceeded(alone)
        return BudgetGrant(new_tokens, alone) if beside == alone else None

    def _allowed_output_tokens(
        self, held_turns: int, held_input: int, held_output: int, new_tokens: int, max_tokens: int
    ) -> int | str:
        """How many tokens may be sampled when others hold this much, or what forbids the call."""
        limits = self.limits
        used_in, used_out = self.input_tokens + held_input, self.output_tokens + held_output
        if limits.max_turns is not None and self.num_turns + held_turns >= limits.max_turns:
            return f"max_turns: all {limits.max_turns} are used"
        if limits.max_input_tokens is not None and used_in + new_tokens > limits.max_input_tokens:
            return f"max_input_tokens: {used_in} of {limits.max_input_tokens} are used, {new_tokens} more are needed"
        if limits.max_output_tokens is not None:
            max_tokens = min(max_tokens, limits.max_output_tokens - used_out)
            if max_tokens < 1:
                return f"max_output_tokens: all {limits.max_output_tokens} are used"
        if limits.max_total_tokens is not None:
            max_tokens = min(max_tokens, limits.max_total_tokens - used_in - used_out - new_tokens)
            if max_tokens < 1:
                total = used_in + used_out
                return (
                    f"max_total_tokens: {total} of {limits.max_total_tokens} are used, "
                    f"{new_tokens} more stand in the prompt"
                )
        return max_tokens
