"""The engine without its thread: add requests, step, cancel, swap weights.

Everything here is a step or runs between two steps, on one thread, so nothing needs a lock and tests can drive it
directly. `Engine` owns the thread.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

import psutil
import torch

from ramify.core.errors import (
    ConfigInvalid,
    ContextOverflow,
    DeadlineExceeded,
    ProviderError,
    QueueFull,
    RequestInvalid,
)
from ramify.infer.block_pool import BlockPool, StateSlots
from ramify.infer.config import EngineConfig, EngineLimits
from ramify.infer.cuda_runner import CudaModelRunner
from ramify.infer.grammar import GrammarState
from ramify.infer.hybrid_runner import HybridModelRunner
from ramify.infer.images import ImageReference, UploadedImages
from ramify.infer.metrics import EngineCounters
from ramify.infer.model_runner import ModelRunner, count_logit_rows
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.roofline import build_step_work
from ramify.infer.sampler import compute_top_logprobs, sample_tokens
from ramify.infer.scheduler import ScheduledChunk, Scheduler
from ramify.model.device_memory import is_out_of_memory
from ramify.model.fused_model import FusedModel, build_fused_model
from ramify.model.load import LoadedModel
from ramify.model.logprob_check import compute_logprobs, describe_error
from ramify.model.weights import StagedWeights, apply_weights, get_untied_tensors
from ramify.processes.training_lock import TRAINING_LOCK_VARIABLE
from ramify.trace.version import UNDEFINED_POLICY, PolicyVersion

KVSwapMode = Literal["recompute", "keep"]
DEADLINE_CHECK_INTERVAL = 0.2  # seconds


def context_overflow_error(prompt_length: str, limit: int) -> ContextOverflow:
    """Return the error for a prompt that leaves no room for a reply."""
    # Clients that shorten a conversation recognize an overflow by the first words.
    maximum = f"This model's maximum context length is {limit} tokens, for prompt and reply together"
    advice = "Shorten it, or serve a larger max_model_len."
    return ContextOverflow(f"{maximum}; the prompt has {prompt_length} tokens. {advice}")


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are being sampled: the requests that get one, each with the index of its token."""

    sampling: list[tuple[EngineRequest, int]]
    wait: Callable[[], tuple[list[int], list[float]]]
    version: PolicyVersion
    has_grammars: bool = False  # whether the masks of the next step depend on its tokens


class EngineCore:
    """A model, its cache and its queue. `version` names the current weights."""

    def __init__(self, model: LoadedModel, config: EngineConfig, version: PolicyVersion) -> None:
        self.model, self.config, self.version = model, config, version
        self.counters = EngineCounters()
        limits = config.get_limits(gpu=model.device.type == "cuda")
        num_blocks, block_size = _num_kv_blocks(model, config, limits), config.block_size
        max_cached_tokens = (num_blocks - 1) * block_size
        if max_cached_tokens < 2:
            problem = f"the cache has room for {max_cached_tokens} tokens, too few for a prompt and a reply"
            advice = "raise inference.kv_memory_fraction or inference.kv_cache_tokens"
            if model.state_specs:
                advice += (
                    ", or lower inference.max_running_requests or inference.state_snapshots: states take memory too"
                )
            raise ConfigInvalid(f"{problem}; {advice}")
        self.runner = _build_runner(model, config, limits, self.counters, num_blocks)
        cache_bytes = config.image_cache_mib << 20
        self.uploaded_images = UploadedImages(model.tower, cache_bytes) if model.tower is not None else None
        self.pool = BlockPool(
            num_blocks,
            block_size,
            self.counters,
            enable_prefix_cache=config.prefix_cache,
            states=_build_state_slots(self.runner, limits, self.counters),
        )
        self.scheduler = Scheduler(
            self.pool,
            self.counters,
            max_running_requests=limits.max_running_requests,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self.scheduler.version = version
        self.max_model_len = min(_max_model_len(model, config), max_cached_tokens)
        self.step_work = build_step_work(model, block_size)
        self.ideal_seconds = 0.0  # the least time that the device needs for all steps so far
        self._last_deadline_check = time.monotonic()
        self._launched: LaunchedStep | None = None  # its tokens have not been read yet
        self._unreported: list[EngineRequest] = []  # got a token or finished between two steps

    # -- requests ------------------------------------------------------------------------------------------------------

    def create_request(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        deadline: float | None = None,
        images: Sequence[ImageReference] = (),
        grammar: GrammarState | None = None,
    ) -> EngineRequest:
        """Return a validated request, not yet in the queue. Thread-safe.

        Raises RequestInvalid, ContextOverflow, or ImageMissing if an image was not uploaded or has been dropped.
        """
        limit, vocab_size = self.max_model_len, self.model.shape.vocab_size
        if not prompt_token_ids:
            raise RequestInvalid("the prompt is empty; at least one token is needed")
        if len(prompt_token_ids) >= limit:
            raise context_overflow_error(str(len(prompt_token_ids)), limit)
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
            unknown = next(token for token in prompt_token_ids if not 0 <= token < vocab_size)
            raise RequestInvalid(f"the prompt holds token id {unknown}; the vocabulary is 0 to {vocab_size - 1}")
        for token, _ in sampling_params.logit_bias:
            if not 0 <= token < vocab_size:
                raise RequestInvalid(f"logit_bias: token id {token} is not in the vocabulary, 0 to {vocab_size - 1}")
        max_tokens = min(sampling_params.max_tokens, limit - len(prompt_token_ids))
        request = EngineRequest(
            prompt_token_ids, sampling_params, max_tokens, cache_salt, priority, deadline, grammar=grammar
        )
        if images:
            uploaded = self.get_uploaded_images()
            request.images = uploaded.resolve(images, prompt_token_ids)
            request.prompt_positions = uploaded.compute_positions(request.images, len(prompt_token_ids))
        return request

    def get_uploaded_images(self) -> UploadedImages:
        """Return the cache of uploaded images. Raises RequestInvalid if the model is a text model."""
        if self.uploaded_images is None:
            raise RequestInvalid("images: the served model reads text only; serve a vision-language model")
        return self.uploaded_images

    def check_capacity(self, num_arriving: int = 0) -> None:
        """Raise QueueFull if the queue, including `num_arriving` requests, is full. Thread-safe."""
        num_waiting = len(self.scheduler.waiting) + num_arriving
        if num_waiting >= self.config.max_queued_requests:
            self.counters.rejected += 1
            raise QueueFull(
                f"{num_waiting} requests are waiting already, the limit is {self.config.max_queued_requests}"
            )

    def enqueue(self, request: EngineRequest) -> None:
        """Put a request in the queue, even if it is full."""
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt_token_ids)
        self.scheduler.add_request(request)

    def cancel(self, request: EngineRequest) -> None:
        """Stop a request, unless it has finished."""
        self.finish_launched_step()
        if request.finish_reason is None:
            self.counters.cancelled += 1
            self._abort(request)

    def _abort(self, request: EngineRequest) -> None:
        request.finish_reason = "abort"
        self.scheduler.finish_request(request)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._unreported)

    def list_unfinished_requests(self) -> list[EngineRequest]:
        """Return all requests that have not finished."""
        return [*self.scheduler.running, *(request for _, request in self.scheduler.waiting)]

    # -- stepping ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[EngineRequest]:
        """Run one step; return the requests that got a token or finished.

        On a GPU the step is only launched, and the tokens of the previous step are returned: while the GPU computes,
        the next step is prepared. Only a step with grammars is waited for: the next masks depend on its tokens.
        """
        expired = self.expire_requests()
        if self._launched is not None and self._launched.has_grammars:
            self.finish_launched_step()
        chunks = self.scheduler.schedule()
        if not chunks or not self._can_launch(chunks):
            self.finish_launched_step()
        elif isinstance(self.runner, CudaModelRunner):
            launched = self._launch(self.runner, chunks)
            self.finish_launched_step()
            self._launched, chunks = launched, []
        # Requests may have finished with the tokens that were read just now.
        if chunks := [chunk for chunk in chunks if chunk.request.finish_reason is None]:
            self._run(chunks)
        return expired + self._take_unreported()

    def flush_outputs(self) -> list[EngineRequest]:
        """Read the tokens of a launched step; return the requests that got a token or finished since the last report.

        Call it when no step follows soon: their tokens would wait for the next one.
        """
        self.finish_launched_step()
        return self._take_unreported()

    def _take_unreported(self) -> list[EngineRequest]:
        unreported, self._unreported = self._unreported, []
        return unreported

    def _can_launch(self, chunks: list[ScheduledChunk]) -> bool:
        """Return whether all tokens of a step are sampled without the host."""
        return isinstance(self.runner, CudaModelRunner) and all(
            chunk.request.is_sampled_on_device and not chunk.request.needs_prompt_logprobs for chunk in chunks
        )

    def _launch(self, runner: CudaModelRunner, chunks: list[ScheduledChunk]) -> LaunchedStep:
        step = runner.launch(chunks)
        self._update_counters(chunks)
        sampling: list[tuple[EngineRequest, int]] = []
        for chunk in step.chunks:
            chunk.request.num_computed_tokens = chunk.stop
            if chunk.samples_next:
                chunk.request.expect_token(len(sampling))
                sampling.append((chunk.request, chunk.stop))
        self.pool.take_snapshots()
        return LaunchedStep(sampling, step.wait, self.version, step.has_grammars)

    def finish_launched_step(self) -> None:
        """Read the tokens of the step that was launched last, if they have not been read."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        tokens, logprobs = launched.wait()
        rows = [row for row, (request, index) in enumerate(launched.sampling) if request.is_expecting(index)]
        requests = [launched.sampling[row][0] for row in rows]
        self._append_tokens(requests, [tokens[row] for row in rows], [logprobs[row] for row in rows], launched.version)

    def _run(self, chunks: list[ScheduledChunk]) -> None:
        """Compute a step and sample from its logits."""
        chunks_by_row, logits = self.runner.run(chunks)
        self._update_counters(chunks)
        for chunk in chunks_by_row:
            chunk.request.num_computed_tokens = chunk.stop
        self.pool.take_snapshots()
        requests = [chunk.request for chunk in chunks_by_row if chunk.samples_next]
        if len(logits) > len(requests):
            logits = self._score_prompts(chunks_by_row, logits)
        if requests:
            self._append_tokens(requests, *self._sample(requests, logits), self.version)

    def _sample(self, requests: list[EngineRequest], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Return the next token of each request, and its logprob."""
        compiled_ops = self.runner.compiled_ops
        return sample_tokens(logits, requests, compiled_ops.sample_tokens if compiled_ops is not None else None)

    def _append_tokens(
        self, requests: list[EngineRequest], tokens: list[int], logprobs: list[float], version: PolicyVersion
    ) -> None:
        if any(map(isnan, logprobs)):  # the KV cache holds NaN too, so the engine cannot continue
            raise ProviderError(f"the logits of {version} are NaN; have its weights diverged?")
        for request, token, logprob in zip(requests, tokens, logprobs):
            if request.grammar is not None and (error := request.grammar.advance(token)) is not None:
                request.error = error
                request.drop_pending()
                self._abort(request)
                continue
            request.append_token(token, logprob, version)
            if request.finish_reason is not None:
                self.counters.finished += 1
                request.drop_pending()
                self.scheduler.finish_request(request)
        self.counters.sampled_tokens += len(requests)
        self._unreported += requests

    def _score_prompts(self, chunks: list[ScheduledChunk], logits: torch.Tensor) -> torch.Tensor:
        """Store the prompt logprobs; return the logits that remain, one row for each request that samples."""
        sample_rows: list[torch.Tensor] = []
        for chunk, rows in zip(chunks, logits.split([count_logit_rows(chunk) for chunk in chunks])):
            request, start = chunk.request, chunk.stop - len(rows) + 1
            targets = request.prompt_token_ids[start : chunk.stop + 1]
            if request.needs_prompt_logprobs and targets:
                target_rows, target_ids = rows[: len(targets)], torch.tensor(targets, device=rows.device)
                request.prompt_logprobs[start:] = compute_logprobs(target_rows, target_ids).tolist()
                num_top = request.sampling_params.prompt_top_logprobs
                request.prompt_top_logprobs[start:] = compute_top_logprobs(target_rows, num_top)
            if chunk.samples_next:
                sample_rows.append(rows[-1:])
        return torch.cat(sample_rows) if sample_rows else logits[:0]

    def _update_counters(self, chunks: list[ScheduledChunk]) -> None:
        counters = self.counters
        num_tokens = [chunk.num_tokens for chunk in chunks]
        counters.steps += 1
        counters.computed_tokens += sum(num_tokens)
        counters.prefill_chunks += [chunk.samples_next for chunk in chunks].count(False)
        counters.mixed_steps += 0 < num_tokens.count(1) < len(num_tokens)
        if self.step_work is not None:
            num_held_blocks = self.pool.num_usable_blocks - self.pool.num_free_blocks
            self.ideal_seconds += self.step_work.ideal_seconds(chunks, num_held_blocks)

    def expire_requests(self) -> list[EngineRequest]:
        """Stop and return the requests whose deadline has passed. Deadlines are checked every few steps."""
        now = time.monotonic()
        if now - self._last_deadline_check < DEADLINE_CHECK_INTERVAL:
            return []
        self._last_deadline_check = now
        self.finish_launched_step()
        unfinished = self.list_unfinished_requests()
        expired = [request for request in unfinished if request.deadline is not None and request.deadline < now]
        for request in expired:
            spent, sampled = f"{now - request.created_at:.1f} s", f"{len(request.logprobs)} tokens"
            request.error = DeadlineExceeded(
                f"a request was not finished after {spent} in the engine, {sampled} sampled"
            )
            self.counters.expired += 1
            self._abort(request)
        return expired

    # -- weights -------------------------------------------------------------------------------------------------------

    def swap_weights(self, staged: StagedWeights, kv_mode: KVSwapMode = "recompute") -> None:
        """Change the weights between two steps. New requests never use keys and values of older weights.

        With `recompute`, running requests are recomputed with the tokens they have; with `keep`, they continue with
        their keys and values, which no other request can use. If the copy fails, the engine has no weights: the
        failure is raised, requests are kept, and no step may run until another swap succeeds.
        """
        self.finish_launched_step()
        running = list(self.scheduler.running)
        if kv_mode == "recompute":
            for request in running:
                self.scheduler.requeue(request)
            self.counters.recomputes += len(running)
        else:
            self.counters.kept += len(running)
        self.pool.reset_prefix_cache(self.scheduler.running)
        if self.runner.image_encoder is not None and self._tower_changes(staged):
            self.runner.image_encoder.clear()
        self.version = self.scheduler.version = PolicyVersion(UNDEFINED_POLICY)
        apply_weights(self.model.module, staged)
        self.version = self.scheduler.version = staged.version
        self.counters.swaps += 1

    @property
    def has_weights(self) -> bool:
        """Whether the weights are complete; otherwise a swap has failed."""
        return self.version.policy != UNDEFINED_POLICY

    def _tower_changes(self, staged: StagedWeights) -> bool:
        """Return whether the staged weights of the vision tower differ from the current ones."""
        tower = self.model.tower
        return tower is not None and any(
            not torch.equal(tensor, staged.tensors[name].to(tensor.device))
            for name, tensor in get_untied_tensors(self.model.module).items()
            if tower.contains_weight(name)
        )

    # -- metrics -------------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return the current values for `/metrics`."""
        known = {} if self.step_work is None else {"ideal_seconds": self.ideal_seconds}
        return known | {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_blocks": self.pool.num_usable_blocks,
            "kv_blocks_free": self.pool.num_free_blocks,
            "kv_usage": 1 - self.pool.num_free_blocks / self.pool.num_usable_blocks,
            "compiled_operators": float(self.runner.compiled_ops is not None),
            "policy_incarnation": self.version.incarnation,
            "policy_step": self.version.step,
        }


def _build_runner(
    model: LoadedModel, config: EngineConfig, limits: EngineLimits, counters: EngineCounters, num_blocks: int
) -> ModelRunner:
    if model.state_specs and config.batch_invariant:
        raise ConfigInvalid("inference.batch_invariant is not supported for models with recurrent layers")
    on_gpu = model.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    use_plans = on_gpu and not config.batch_invariant
    fused_model, problem = _build_fused_model(model, config, planned=use_plans)
    options: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "num_state_slots": limits.max_running_requests + limits.num_state_snapshots,
        "ops_problem": problem,
    }
    if model.state_specs and fused_model is None:
        return HybridModelRunner(model, counters, **options)
    options |= {"fused_model": fused_model, "feature_cache_bytes": config.image_cache_mib << 20}
    if use_plans:
        max_rows, max_requests = limits.max_num_batched_tokens, limits.max_running_requests
        share = config.share_prefixes
        return CudaModelRunner(
            model, counters, max_rows=max_rows, max_requests=max_requests, share_prefixes=share, **options
        )
    fixed_rows = limits.max_num_batched_tokens if config.batch_invariant else None
    return ModelRunner(model, counters, fixed_rows=fixed_rows, **options)


def _build_fused_model(
    model: LoadedModel, config: EngineConfig, *, planned: bool
) -> tuple[FusedModel | None, str | None]:
    """Return the fused forward if the model has one, and what went wrong if it cannot be built."""
    # Steps with images run the model's own code, and in batch-invariant mode every step must have the same bits.
    if not config.fused_ops or (config.batch_invariant and model.tower is not None):
        return None, None
    try:
        return build_fused_model(model.module, planned=planned, state_specs=model.state_specs), None
    except Exception as error:  # a model with another structure than its type's may fail anywhere
        if is_out_of_memory(error):
            raise
        return None, describe_error(error)


def _build_state_slots(runner: ModelRunner, limits: EngineLimits, counters: EngineCounters) -> StateSlots | None:
    if runner.states is None:
        return None
    return StateSlots(runner.states, limits.max_running_requests, limits.num_state_snapshots, counters)


def _max_model_len(model: LoadedModel, config: EngineConfig) -> int:
    return min(config.max_model_len or model.shape.max_positions, model.shape.max_positions)


def _num_kv_blocks(model: LoadedModel, config: EngineConfig, limits: EngineLimits) -> int:
    """Return the number of blocks of the cache, including the reserved one.

    If a trainer shares the GPU, what is free depends on when it allocates, so the fraction is of all memory, as in the
    plan of the run; the trainer leaves it.
    """
    block_size = config.block_size
    if config.kv_cache_tokens is not None:
        return -(-config.kv_cache_tokens // block_size) + 1
    shape = model.shape
    bytes_per_token = 2 * len(shape.kv_layers) * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    on_gpu = model.device.type == "cuda"
    is_shared = TRAINING_LOCK_VARIABLE in os.environ
    available_bytes = torch.cuda.mem_get_info(model.device)[is_shared] if on_gpu else psutil.virtual_memory().available
    num_states = limits.max_running_requests + limits.num_state_snapshots
    state_bytes = num_states * sum(spec.nbytes for spec in model.state_specs)
    cache_bytes = max(0, int(available_bytes * limits.kv_memory_fraction) - state_bytes)
    affordable = cache_bytes // (bytes_per_token * block_size)
    return min(affordable, -(-limits.max_running_requests * _max_model_len(model, config) // block_size)) + 1
