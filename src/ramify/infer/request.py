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

    from ramify.infer.block_pool import Block

MIN_TEMPERATURE = 1e-6  # temperature
MAX_LOGIT_BIAS = 1e6  # bias; over the coldest temperature it is still a number in float32
FinishReason = Literal["stop", "length", "abort"]
_arrival_counter = count()


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.RUNNING, RequestStatus.WAITING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
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
        cold = f"0, which is greedy, or a number of at least {MIN_TEMPERATURE:g}"
        bounds = [
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                cold,
                self.temperature,
            ),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]", self.top_p),
            ("top_k", self.top_k >= -1, "at least 0 (0 or -1 is off)", self.top_k),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]", self.min_p),
            ("max_tokens", self.max_tokens >= 1, "at least 1", self.max_tokens),
            ("prompt_top_logprobs", 0 <= self.prompt_top_logprobs <= 20, "0 to 20", self.prompt_top_logprobs),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "0 to 20", self.top_logprobs),
            *(
                ("logit_bias", abs(by) <= MAX_LOGIT_BIAS, f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}", by)
                for _, by in self.logit_bias
            ),
        ]
        for name, good, expected, found in bounds:
            if not good:
                raise RequestInvalid(f"{name}: expected {expected}, got {found}")

    @property
    def has_filters(self) -> bool:
        """Whether only a part of the vocabulary may be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_plain(self) -> bool:
        """Whether a token is drawn from the distribution as it is, and nothing else is asked for."""
        return self.temperature > 0 and not (self.has_filters or self.logit_bias or self.top_logprobs)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence: the prompt, and the tokens sampled so far."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # as asked, within the model's length
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic
    arrival_index: int = field(default_factory=lambda: next(_arrival_counter))
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt and sampled
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[PolicyVersion, int]] = field(
        default_factory=list
    )  # and the sampled token each begins at
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # tokens found there when it was first admitted
    blocks: list["Block"] = field(default_factory=list)
    num_shared_blocks: int = 0  # leading blocks that others may share
    cache_node: "Block | None" = None  # where the next block is published; None if this request must not share
    kv_runs: list[tuple[PolicyVersion, int]] = field(
        default_factory=list
    )  # versions older than the current one, up to where
    block_table: "np.ndarray | None" = None  # the numbers of `blocks`, as far as they were written down
    block_table_len: int = 0
    finish_reason: FinishReason | None = None
    error: RamifyError | None = None
    seed: int = 0
    is_plain: bool = False
    created_at: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.seed = (
            random.getrandbits(64) if self.sampling_params.seed is None else self.sampling_params.seed & (1 << 64) - 1
        )
        self.is_plain = self.sampling_params.is_plain
        if self.sampling_params.prompt_logprobs:
            self.prompt_logprobs, self.prompt_top_logprobs = [None], [[]]

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """Who goes first: by priority, then by arrival."""
        return (self.priority, self.arrival_index)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    def set_status(self, status: RequestStatus) -> None:
        """Change the state; an illegal change raises."""
        if (self.status, status) not in TRANSITIONS:
            raise AssertionError(f"request {self.arrival_index} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def append_token(self, token: int, logprob: float, version: PolicyVersion) -> None:
        """Take a sampled token, and finish if it was the last.

        The logprob comes last: a reader in another thread counts those first, and then finds the rest.
        """
        self.token_ids.append(token)
        if not self.version_starts or self.version_starts[-1][0] is not version:
            self.version_starts.append((version, len(self.logprobs)))
        self.logprobs.append(logprob)
        if token in self.sampling_params.stop_ids:
            self.finish_reason = "stop"
        elif len(self.logprobs) >= self.max_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request produced. Without a prompt it is a part of one, as a stream delivers them."""

    token_ids: list[int]
    logprobs: list[float]
    version_runs: list[tuple[PolicyVersion, int]]
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_cached_tokens: int = 0
