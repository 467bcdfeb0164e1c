"""The budget of turns and tokens of a rollout, exact even for concurrent calls.

A call reserves its maximum before it starts and releases what it did not use when it ends, so that the sum cannot
exceed a limit. A call waits for running calls if their reservations would shrink its grant. So a call is refused or
truncated only because of tokens really used, never because of the order of arrival.
"""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from ramify.core.errors import BudgetExceeded, ContextOverflow
from ramify.infer.gateway.config import RolloutLimits

NO_TOKEN_LIMIT = 2**20  # max_tokens of a reply without a limit; the server stops it at the end of its context


class BudgetGrant(Struct, eq=False):
    """The reservation of a running call: one turn, `input_tokens` of new context, `output_tokens` to sample."""

    input_tokens: int
    output_tokens: int


class RolloutBudget:
    """The turns and tokens that a rollout has used, and the reservations of its running calls."""

    def __init__(self, limits: RolloutLimits) -> None:
        self.limits = limits
        self.limits_input = limits.max_input_tokens is not None or limits.max_total_tokens is not None
        self.num_turns = self.input_tokens = self.output_tokens = 0
        self._grants: set[BudgetGrant] = set()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def exhausted_limit(self) -> str | None:
        """The name of the limit that allows no further call, or None."""
        limits = self.limits
        for name, count, limit in (
            ("max_turns", self.num_turns, limits.max_turns),
            ("max_input_tokens", self.input_tokens, limits.max_input_tokens),
            ("max_output_tokens", self.output_tokens, limits.max_output_tokens),
            ("max_total_tokens", self.input_tokens + self.output_tokens, limits.max_total_tokens),
        ):
            if limit is not None and count >= limit:
                return name
        return None

    @property
    def remaining_turns(self) -> int | None:
        """How many more calls `max_turns` allows; None without this limit."""
        return None if self.limits.max_turns is None else self.limits.max_turns - self.num_turns

    @property
    def remaining_tokens(self) -> int | None:
        """How many more tokens the scarcest of the token limits allows; None without such a limit."""
        limits = self.limits
        remaining = (
            (limits.max_input_tokens, self.input_tokens),
            (limits.max_output_tokens, self.output_tokens),
            (limits.max_total_tokens, self.input_tokens + self.output_tokens),
        )
        return min((limit - used for limit, used in remaining if limit is not None), default=None)

    async def reserve(
        self, count_new_tokens: Callable[[], int], *, max_tokens: int, prompt_len: int, max_model_len: int | None
    ) -> BudgetGrant:
        """Reserve the budget of a call whose prompt has `prompt_len` tokens; wait for running calls if necessary.

        `count_new_tokens` returns how many tokens of the prompt the trace does not have yet. `max_tokens` is the most
        that the call asks for, `max_model_len` the longest sequence of the model. Raises BudgetExceeded or
        ContextOverflow if the call can never run.
        """
        while (grant := self._try_reserve(count_new_tokens(), max_tokens, prompt_len, max_model_len)) is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._grants.add(grant)
        return grant

    def release(self, grant: BudgetGrant, *, num_turns: int = 0, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Record what a call used, release the rest of its grant and wake the waiting calls."""
        self._grants.discard(grant)
        self.num_turns += num_turns
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _try_reserve(
        self, new_tokens: int, max_tokens: int, prompt_len: int, max_model_len: int | None
    ) -> BudgetGrant | None:
        """Return the grant, or None if the call has to wait for running calls. Raises if it can never run."""
        limits = self.limits
        for name, limit in (("seq_len", limits.seq_len), ("the model's length", max_model_len)):
            if limit is not None:
                if prompt_len >= limit:
                    raise ContextOverflow(
                        f"This model's maximum context length is {limit} tokens ({name}); the prompt "
                        f"has {prompt_len} tokens"
                    )
                max_tokens = min(max_tokens, limit - prompt_len)
        held_input = sum(grant.input_tokens for grant in self._grants)
        held_output = sum(grant.output_tokens for grant in self._grants)
        allowed_alone = self._allowed_output_tokens(0, 0, 0, new_tokens, max_tokens)
        allowed_now = (
            self._allowed_output_tokens(len(self._grants), held_input, held_output, new_tokens, max_tokens)
            if self._grants
            else allowed_alone
        )
        if isinstance(allowed_alone, str):
            raise BudgetExceeded(allowed_alone)
        return BudgetGrant(new_tokens, allowed_alone) if allowed_now == allowed_alone else None

    def _allowed_output_tokens(
        self, held_turns: int, held_input: int, held_output: int, new_tokens: int, max_tokens: int
    ) -> int | str:
        """Return how many tokens may be sampled beside these reservations, or which limit forbids the call."""
        limits = self.limits
        used_input, used_output = self.input_tokens + held_input, self.output_tokens + held_output
        if limits.max_turns is not None and self.num_turns + held_turns >= limits.max_turns:
            return f"max_turns: all {limits.max_turns} are used"
        if limits.max_input_tokens is not None and used_input + new_tokens > limits.max_input_tokens:
            return f"max_input_tokens: {used_input} of {limits.max_input_tokens} are used, {new_tokens} more are needed"
        if limits.max_output_tokens is not None:
            max_tokens = min(max_tokens, limits.max_output_tokens - used_output)
            if max_tokens < 1:
                return f"max_output_tokens: all {limits.max_output_tokens} are used"
        if limits.max_total_tokens is not None:
            max_tokens = min(max_tokens, limits.max_total_tokens - used_input - used_output - new_tokens)
            if max_tokens < 1:
                total = used_input + used_output
                return (
                    f"max_total_tokens: {total} of {limits.max_total_tokens} are used, the prompt has {new_tokens} more"
                )
        return max_tokens
