"""A request on its way through the engine, and its output.

    WAITING -> RUNNING -> FINISHED
       ^         |
       +---------+   preempted, or to be recomputed with new weights

A request that goes back to WAITING keeps the tokens it has sampled; only their keys and values are recomputed. So its
progress is two numbers, `len(token_ids)` and `num_computed_tokens`, and prefill and decoding are the same: computing
tokens that are not computed yet. When the last one is computed, the next token is sampled.
"""

import random
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Literal

from ramify.core.errors import RamifyError, RequestInvalid
from ramify.trace.version import PolicyVersion

if TYPE_CHECKING:
    import numpy as np

    from ramify.infer.grammar import GrammarState
    from ramify.infer.images import EngineImage


class Block:
    """One block of the KV cache: its id, how many requests hold it, and its place in the tree of cached prefixes."""

    __slots__ = ("block_id", "children", "parent", "ref_count", "token_key")

    def __init__(self, block_id: int, token_key: Hashable = None) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.parent: Block | None = None
        self.token_key = token_key
        self.children: dict[Hashable, Block] = {}

    def detach(self) -> None:
        """Forget the place in the tree."""
        self.parent, self.token_key, self.children = None, None, {}


MIN_TEMPERATURE = 1e-6
MAX_LOGIT_BIAS = 1e6  # divided by the smallest temperature it is still finite in float32
FinishReason = Literal["stop", "length", "abort"]
TopLogprobs = list[list[tuple[int, float]]]  # for each token the likeliest (token id, logprob)
PENDING_TOKEN = -1
NO_STATE_SLOT = -1
_arrival_counter = count()


class RequestStatus(Enum):
    """Where a request is in its life cycle."""

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
    """How the next token is sampled. Temperature 0 is greedy; top_k 0 or -1 is off. Raises RequestInvalid."""

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
    logprobs_start: int = 0  # prompt logprobs begin at this token, so that a cached prefix before it stays cached

    def __post_init__(self) -> None:
        temperature_is_valid = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")
        temperatures = f"0, which is greedy, or a number of at least {MIN_TEMPERATURE:g}"
        biases = f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
        checks = [
            ("temperature", temperature_is_valid, temperatures, self.temperature),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]", self.top_p),
            ("top_k", self.top_k >= -1, "at least 0 (0 or -1 is off)", self.top_k),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]", self.min_p),
            ("max_tokens", self.max_tokens >= 1, "at least 1", self.max_tokens),
            ("prompt_top_logprobs", self.prompt_top_logprobs >= 0, "at least 0", self.prompt_top_logprobs),
            ("logprobs_start", self.logprobs_start >= 0, "at least 0", self.logprobs_start),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "0 to 20", self.top_logprobs),
            *(("logit_bias", abs(bias) <= MAX_LOGIT_BIAS, biases, bias) for _, bias in self.logit_bias),
        ]
        for name, is_valid, expected, actual in checks:
            if not is_valid:
                raise RequestInvalid(f"{name}: expected {expected}, got {actual}")

    @property
    def has_filters(self) -> bool:
        """Whether only a part of the vocabulary may be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are sampled from the unmodified distribution and no top logprobs are requested."""
        return self.temperature > 0 and not (self.has_filters or self.logit_bias or self.top_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and no top logprobs are requested."""
        return self.temperature == 0 and not (self.logit_bias or self.top_logprobs)


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence: the prompt, and the tokens sampled so far."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # as requested, limited by the model's length
    cache_salt: str = ""
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic
    images: "tuple[EngineImage, ...]" = ()
    prompt_positions: "np.ndarray | None" = None  # [3, prompt tokens]; None if a position is the index of a token
    grammar: "GrammarState | None" = None  # which tokens may be sampled
    arrival_index: int = field(default_factory=lambda: next(_arrival_counter))
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt and sampled
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[PolicyVersion, int]] = field(default_factory=list)  # and its first sampled token
    top_logprobs: TopLogprobs = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: TopLogprobs = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    num_cached_tokens: int = 0  # tokens that were in the cache when the request was first admitted
    blocks: list["Block"] = field(default_factory=list)
    num_shared_blocks: int = 0  # leading blocks that other requests may use
    cache_node: "Block | None" = None  # parent of the next shared block; None if this request must not share
    state_slot: int = NO_STATE_SLOT  # of the recurrent states, if the model has such layers and the request runs
    reply_snapshot: "Block | None" = None  # block of the reply with a snapshot of the state
    fork_boundary: int = 0  # tokens that other requests have in common with this one, beyond the last snapshot
    block_table: "np.ndarray | None" = None  # the ids of the first `block_table_len` blocks
    block_table_len: int = 0
    num_pending: int = 0  # tokens at the end of `token_ids` that are being sampled; PENDING_TOKEN stands for them
    pending_row: int = 0  # row of the last one in its step
    finish_reason: FinishReason | None = None
    error: RamifyError | None = None
    seed: int = 0
    is_plain: bool = False
    is_sampled_on_device: bool = False  # whether the kernels for CUDA can sample its tokens
    created_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.token_ids = list(self.prompt_token_ids)
        self.seed = random.getrandbits(64) if params.seed is None else params.seed & (1 << 64) - 1
        self.is_plain = params.is_plain and self.grammar is None
        self.is_sampled_on_device = params.is_plain or params.is_greedy
        if params.prompt_logprobs:
            num_skipped = min(max(1, params.logprobs_start), len(self.prompt_token_ids))
            self.prompt_logprobs = [None] * num_skipped
            self.prompt_top_logprobs = [[] for _ in range(num_skipped)]

    @property
    def scheduling_key(self) -> tuple[int, int]:
        """The order of scheduling: by priority, then by arrival."""
        return (self.priority, self.arrival_index)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are requested and not all of them are computed."""
        return self.sampling_params.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def num_cacheable_tokens(self) -> int:
        """How many of the first tokens need no logits, so that a cached prefix of them can be used.

        The logits of a token predict the next one, so the last token before a logprob must be computed.
        """
        if self.needs_prompt_logprobs:
            return max(1, self.sampling_params.logprobs_start) - 1
        return len(self.token_ids) - 1

    def get_block_key(self, start: int, stop: int) -> tuple[Hashable, ...]:
        """Return what identifies the tokens [start, stop) in the prefix cache: their ids, and the images in them."""
        ids = self.token_ids[start:stop]
        if not self.images:
            return tuple(ids)
        overlapping = (item for item in self.images if item.start < stop and start < item.stop)
        return (*ids, *((item.image.hash, item.start - start) for item in overlapping))

    def get_positions(self, start: int, stop: int) -> "np.ndarray":
        """Return the positions [3, tokens] of tokens for a model whose image tokens lie on a grid."""
        import numpy as np

        prompt = self.prompt_positions
        if prompt is None:
            return np.tile(np.arange(start, stop), (3, 1))
        num_prompt = prompt.shape[1]
        first_after = int(prompt[:, -1].max()) + 1  # the position after the prompt
        positions = np.tile(np.arange(start, stop) - num_prompt + first_after, (3, 1))
        positions[:, : max(0, num_prompt - start)] = prompt[:, start:stop]
        return positions

    def set_status(self, status: RequestStatus) -> None:
        """Change the status; an illegal transition raises."""
        if (self.status, status) not in TRANSITIONS:
            raise AssertionError(f"request {self.arrival_index} cannot go from {self.status.name} to {status.name}")
        self.status = status

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens without those that are being sampled."""
        return len(self.token_ids) - self.num_pending

    @property
    def has_all_tokens(self) -> bool:
        """Whether the last token that it may have is sampled or being sampled."""
        return len(self.token_ids) - len(self.prompt_token_ids) >= self.max_tokens

    def is_expecting(self, index: int) -> bool:
        """Return whether the token with this index is being sampled."""
        return self.num_known_tokens <= index < len(self.token_ids)

    def expect_token(self, row: int) -> None:
        """Note that the next token is being sampled, in this row of a step."""
        self.token_ids.append(PENDING_TOKEN)
        self.num_pending += 1
        self.pending_row = row

    def drop_pending(self) -> None:
        """Forget the tokens that are being sampled: the request has finished before them."""
        if self.num_pending:
            del self.token_ids[-self.num_pending :]
            self.num_pending = 0

    def append_token(self, token: int, logprob: float, version: PolicyVersion) -> None:
        """Add a sampled token, which may have been expected, and set the finish reason if it was the last.

        The logprob is appended last: a reader in another thread counts the logprobs first, and then finds the rest.
        """
        if self.num_pending:
            self.token_ids[-self.num_pending] = token
            self.num_pending -= 1
        else:
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
    """What a request produced, or what it has produced since the last output of its stream."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[PolicyVersion, int]]  # and the number of tokens that it sampled
    finish_reason: FinishReason | None
    top_logprobs: TopLogprobs = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: TopLogprobs = field(default_factory=list)
    num_cached_tokens: int = 0
