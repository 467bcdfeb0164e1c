"""A request on its way through the engine, and what comes back.

    WAITING -> RUNNING -> FINISHED
       ^         |
       +---------+   preempted, or to be computed again under new weights

A request that goes back to WAITING keeps the tokens it has sampled; only their keys and values are computed again. So
its state is two numbers, `len(tokens)` and `computed`, and prefill and decoding are the same thing: computing tokens
that are not computed yet. Where the last one is computed, the next token is sampled.
"""

import random
import time
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Literal

from ramify.errors import RamifyError, RequestInvalid
from ramify.model.version import PolicyVersion

if TYPE_CHECKING:
    import numpy as np

    from ramify.infer.blocks import Block

COLDEST = 1e-6  # temperature
HEAVIEST = 1e6  # bias; over the coldest temperature it is still a number in float32
FinishReason = Literal["stop", "length", "abort"]
_arrivals = count()


class State(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


ALLOWED = {
    (State.WAITING, State.RUNNING),
    (State.RUNNING, State.WAITING),
    (State.WAITING, State.FINISHED),
    (State.RUNNING, State.FINISHED),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0

    def __post_init__(self) -> None:
        cold = f"0, which is greedy, or a number of at least {COLDEST:g}"
        bounds = [
            (
                "temperature",
                self.temperature == 0 or COLDEST <= self.temperature < float("inf"),
                cold,
                self.temperature,
            ),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]", self.top_p),
            ("top_k", self.top_k >= -1, "at least 0 (0 or -1 is off)", self.top_k),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]", self.min_p),
            ("max_tokens", self.max_tokens >= 1, "at least 1", self.max_tokens),
            ("prompt_top_logprobs", 0 <= self.prompt_top_logprobs <= 20, "0 to 20", self.prompt_top_logprobs),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "0 to 20", self.top_logprobs),
            *(("logit_bias", abs(by) <= HEAVIEST, f"-{HEAVIEST:g} to {HEAVIEST:g}", by) for _, by in self.logit_bias),
        ]
        for name, good, expected, found in bounds:
            if not good:
                raise RequestInvalid(f"{name}: expected {expected}, got {found}")

    @property
    def filtered(self) -> bool:
        """Whether only a part of the vocabulary may be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def plain(self) -> bool:
        """Whether a token is drawn from the distribution as it is, and nothing else is asked for."""
        return self.temperature > 0 and not (self.filtered or self.logit_bias or self.top_logprobs)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: the prompt, and the tokens sampled so far."""

    prompt: list[int]
    sampling: Sampling
    max_tokens: int  # as asked, within the model's length
    salt: str = ""
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic
    arrival: int = field(default_factory=lambda: next(_arrivals))
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and sampled
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)  # and the sampled token each begins at
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the cache
    cached: int = 0  # tokens found there when it was first admitted
    blocks: list["Block"] = field(default_factory=list)
    published: int = 0  # leading blocks that others may share
    node: "Block | None" = None  # where the next block is published; None if this request must not share
    kv_runs: list[tuple[PolicyVersion, int]] = field(
        default_factory=list
    )  # versions older than the current one, up to where
    table: "np.ndarray | None" = None  # the numbers of `blocks`, as far as they were written down
    tabled: int = 0
    finish: FinishReason | None = None
    error: RamifyError | None = None
    seed: int = 0
    plain: bool = False
    created: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.seed = random.getrandbits(64) if self.sampling.seed is None else self.sampling.seed & (1 << 64) - 1
        self.plain = self.sampling.plain
        if self.sampling.prompt_logprobs:
            self.prompt_logprobs, self.prompt_top = [None], [[]]

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: by priority, then by arrival."""
        return (self.priority, self.arrival)

    @property
    def sampled(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[len(self.prompt) :]

    def move(self, state: State) -> None:
        """Change the state; an illegal change raises."""
        if (self.state, state) not in ALLOWED:
            raise AssertionError(f"request {self.arrival} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def append(self, token: int, logprob: float, version: PolicyVersion) -> None:
        """Take a sampled token, and finish if it was the last.

        The logprob comes last: a reader in another thread counts those first, and then finds the rest.
        """
        self.tokens.append(token)
        if not self.versions or self.versions[-1][0] is not version:
            self.versions.append((version, len(self.logprobs)))
        self.logprobs.append(logprob)
        if token in self.sampling.stop_ids:
            self.finish = "stop"
        elif len(self.logprobs) >= self.max_tokens:
            self.finish = "length"


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced. Without a prompt it is a part of one, as a stream delivers them."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[PolicyVersion, int]]
    finish: FinishReason | None
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    cached: int = 0
