"""The engine without its thread: add requests, step, cancel, swap weights.

Everything here runs between two steps or is a step, on one thread, so nothing needs a lock and a test can drive it by
hand. `Engine` owns the thread.
"""

import time
from math import isnan
from typing import Literal

import psutil
import torch

from ramify.errors import ConfigInvalid, ContextOverflow, DeadlineExceeded, ProviderError, QueueFull, RequestInvalid
from ramify.infer.block_pool import BlockPool
from ramify.infer.config import EngineConfig
from ramify.infer.metrics import EngineCounters
from ramify.infer.model_runner import ModelRunner, count_logit_rows, needs_prompt_logprobs
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import compute_logprobs, compute_top_logprobs, sample_tokens
from ramify.infer.scheduler import ScheduledChunk, Scheduler
from ramify.model.load import LoadedModel
from ramify.model.version import PolicyVersion
from ramify.model.weights import StagedWeights, apply_weights

KVSwapMode = Literal["recompute", "keep"]
DEADLINE_CHECK_INTERVAL = 0.2  # seconds between two looks at the deadlines


def context_overflow_error(prompt_length: str, limit: int) -> ContextOverflow:
    """Return the error for a prompt that leaves no room for a reply."""
    # Clients that shorten a conversation recognize an overflow by the first words.
    most = f"This model's maximum context length is {limit} tokens, for prompt and reply together"
    return ContextOverflow(
        f"{most}; the prompt has {prompt_length} tokens. Shorten it, or serve a larger max_model_len."
    )


class EngineCore:
    """A model, its cache, its queue."""

    def __init__(self, model: LoadedModel, config: EngineConfig, version: PolicyVersion) -> None:
        self.model, self.config, self.version = model, config, version
        self.counters = EngineCounters()
        blocks = _num_kv_blocks(model, config)
        fixed = config.max_batch_tokens if config.batch_invariant else None
        size = config.block_size
        room = (blocks - 1) * size
        if room < 2:
            said = f"the cache has room for {room} tokens, too few for a prompt and a reply"
            raise ConfigInvalid(f"{said}; raise inference.memory or inference.kv_tokens")
        self.runner = ModelRunner(
            model, self.counters, num_blocks=blocks, block_size=size, fused=config.fused, fixed_rows=fixed
        )
        self.pool = BlockPool(blocks, size, self.counters, enable_prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(
            self.pool, self.counters, max_running=config.max_running, max_batch_tokens=config.max_batch_tokens
        )
        self.scheduler.version = version
        self.max_model_len = min(_max_model_len(model, config), room)
        self._last_deadline_check = time.monotonic()

    # -- requests ------------------------------------------------------------------------------------------------------

    def create_request(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        deadline: float | None = None,
    ) -> EngineRequest:
        """A checked request, not yet in the queue. Safe to call from any thread."""
        limit, vocab = self.max_model_len, self.model.shape.vocab_size
        if not prompt_token_ids:
            raise RequestInvalid("the prompt is empty; at least one token is needed")
        if len(prompt_token_ids) >= limit:
            raise context_overflow_error(str(len(prompt_token_ids)), limit)
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab:
            found = next(token for token in prompt_token_ids if not 0 <= token < vocab)
            raise RequestInvalid(f"the prompt holds token id {found}; the vocabulary is 0 to {vocab - 1}")
        for token, _ in sampling_params.logit_bias:
            if not 0 <= token < vocab:
                raise RequestInvalid(f"logit_bias: token id {token} is not in the vocabulary, 0 to {vocab - 1}")
        room = min(sampling_params.max_tokens, limit - len(prompt_token_ids))
        return EngineRequest(prompt_token_ids, sampling_params, room, cache_salt, priority, deadline)

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in the queue, or refuse it if the queue is full."""
        self.check_capacity()
        self.enqueue(request)

    def check_capacity(self, num_arriving: int = 0) -> None:
        """Raises QueueFull where there is none, those included that will soon be in the queue. Safe from any thread."""
        waiting = len(self.scheduler.waiting) + num_arriving
        if waiting >= self.config.queue:
            self.counters.rejected += 1
            raise QueueFull(f"{waiting} requests wait already, the limit is {self.config.queue}")

    def enqueue(self, request: EngineRequest) -> None:
        """Put a request in the queue."""
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        self.scheduler.add_request(request)

    def cancel(self, request: EngineRequest) -> bool:
        """Stop a request where it is; False if it has finished by itself."""
        if request.finish_reason is not None:
            return False
        request.finish_reason = "abort"
        self.counters.cancelled += 1
        self.scheduler.finish_request(request)
        return True

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def list_unfinished_requests(self) -> list[EngineRequest]:
        """All requests that have not finished."""
        return [*self.scheduler.running, *(request for _, request in self.scheduler.waiting)]

    # -- stepping ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Run one step; the requests that got a token or finished."""
        late = self.expire_requests()
        chunks = self.scheduler.schedule()
        if not chunks:
            return late
        ordered, logits = self.runner.run(chunks)
        self._update_counters(chunks)
        for chunk in ordered:
            chunk.request.num_computed_tokens = chunk.stop
        return late + self._sample(ordered, logits)

    def _sample(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> list[EngineRequest]:
        requests = [chunk.request for chunk in chunks if chunk.samples_next]
        if len(logits) > len(requests):
            logits = self._score_prompts(chunks, logits)
        if not requests:
            return []
        compiled = self.runner.compiled_ops
        tokens, logprobs = sample_tokens(logits, requests, compiled and compiled.sample_tokens)
        if any(map(isnan, logprobs)):  # the cache holds no numbers either: nothing here can be used any more
            raise ProviderError(f"the logits of {self.version} are not numbers; have its weights diverged?")
        for request, token, logprob in zip(requests, tokens, logprobs):
            request.append_token(token, logprob, self.version)
            if request.finish_reason is not None:
                self.counters.finished += 1
                self.scheduler.finish_request(request)
        self.counters.sampled_tokens += len(requests)
        return requests

    def _score_prompts(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> torch.Tensor:
        """Take prompt logprobs off the logits; what is left is one row for each request that samples."""
        rest: list[torch.Tensor] = []
        for chunk, rows in zip(chunks, logits.split([count_logit_rows(chunk) for chunk in chunks])):
            request = chunk.request
            if needs_prompt_logprobs(chunk):
                targets = request.prompt_token_ids[chunk.start + 1 : chunk.stop + 1]
                found = compute_logprobs(rows[: len(targets)], torch.tensor(targets, device=rows.device))
                request.prompt_logprobs[chunk.start + 1 :] = found.tolist()
                top = compute_top_logprobs(rows[: len(targets)], request.sampling_params.prompt_top_logprobs)
                request.prompt_top_logprobs[chunk.start + 1 :] = top
            if chunk.samples_next:
                rest.append(rows[-1:])
        return torch.cat(rest) if rest else logits[:0]

    def _update_counters(self, chunks: list[ScheduledChunk]) -> None:
        counters = self.counters
        new = [chunk.stop - chunk.start for chunk in chunks]
        counters.steps += 1
        counters.computed_tokens += sum(new)
        counters.prefill_chunks += [chunk.samples_next for chunk in chunks].count(False)
        counters.mixed_steps += 0 < new.count(1) < len(new)

    def expire_requests(self) -> list[EngineRequest]:
        """Take out the requests whose deadline has passed."""
        now = time.monotonic()
        if now - self._last_deadline_check < DEADLINE_CHECK_INTERVAL:
            return []
        self._last_deadline_check = now
        late = [
            request
            for request in self.list_unfinished_requests()
            if request.deadline is not None and request.deadline < now
        ]
        for request in late:
            spent = now - request.created_at
            said = (
                f"a request was not finished after {spent:.1f} s in the engine, {len(request.logprobs)} tokens sampled"
            )
            request.error = DeadlineExceeded(said)
            request.finish_reason = "abort"
            self.counters.expired += 1
            self.scheduler.finish_request(request)
        return late

    # -- weights -------------------------------------------------------------------------------------------------------

    def swap_weights(self, staged: StagedWeights, kv_mode: KVSwapMode = "recompute") -> None:
        """Change the weights between two steps. No new request ever finds what older weights have computed.

        With `recompute` the running requests start over with the tokens they have; with `keep` they go on with the
        keys and values they have, and share them with nobody.
        """
        running = list(self.scheduler.running)
        if kv_mode == "recompute":
            for request in running:
                self.scheduler.requeue(request)
            self.counters.recomputes += len(running)
        else:
            for request in running:
                request.kv_runs.append((self.version, request.num_computed_tokens))
            self.counters.kept += len(running)
        self.pool.reset_prefix_cache(self.scheduler.running)
        apply_weights(self.model.module, staged)
        self.version = self.scheduler.version = staged.version
        self.counters.swaps += 1

    # -- what there is -------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """What the engine holds now."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_blocks": self.pool.num_usable_blocks,
            "kv_blocks_free": self.pool.num_free_blocks,
            "kv_usage": 1 - self.pool.num_free_blocks / self.pool.num_usable_blocks,
            "compiled_operators": float(self.runner.compiled_ops is not None),
            "policy_incarnation": self.version.incarnation,
            "policy_step": self.version.step,
        }


def _max_model_len(model: LoadedModel, config: EngineConfig) -> int:
    return min(config.max_model_len or model.shape.max_positions, model.shape.max_positions)


def _num_kv_blocks(model: LoadedModel, config: EngineConfig) -> int:
    """Blocks of the cache, the one kept back included."""
    size = config.block_size
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // size) + 1
    shape = model.shape
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    cuda = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if cuda else psutil.virtual_memory().available
    affordable = int(free * config.memory) // (token * size)
    return min(affordable, -(-config.max_running * _max_model_len(model, config) // size)) + 1
