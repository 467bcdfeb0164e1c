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
from ramify.infer.blocks import BlockPool
from ramify.infer.config import EngineConfig
from ramify.infer.metrics import Counters
from ramify.infer.request import Request, Sampling
from ramify.infer.runner import Runner, scored, wanted
from ramify.infer.sampler import logprobs_of, sample, top_logprobs_of
from ramify.infer.scheduler import Chunk, Scheduler
from ramify.model.load import LoadedModel
from ramify.model.version import PolicyVersion
from ramify.model.weights import StagedWeights, apply_weights

KV = Literal["recompute", "keep"]
LOOKOUT = 0.2  # seconds between two looks at the deadlines


def context_overflow(tokens: str, limit: int) -> ContextOverflow:
    """Return the error for a prompt that leaves no room for a reply."""
    # Clients that shorten a conversation recognize an overflow by the first words.
    most = f"This model's maximum context length is {limit} tokens, for prompt and reply together"
    return ContextOverflow(f"{most}; the prompt has {tokens} tokens. Shorten it, or serve a larger max_model_len.")


class Core:
    """A model, its cache, its queue."""

    def __init__(self, model: LoadedModel, config: EngineConfig, version: PolicyVersion) -> None:
        self.model, self.config, self.version = model, config, version
        self.counters = Counters()
        blocks = _blocks(model, config)
        fixed = config.max_batch_tokens if config.batch_invariant else None
        size = config.block_size
        room = (blocks - 1) * size
        if room < 2:
            said = f"the cache has room for {room} tokens, too few for a prompt and a reply"
            raise ConfigInvalid(f"{said}; raise inference.memory or inference.kv_tokens")
        self.runner = Runner(model, self.counters, blocks=blocks, block_size=size, fused=config.fused, fixed_rows=fixed)
        self.pool = BlockPool(blocks, size, self.counters, sharing=config.prefix_cache)
        self.scheduler = Scheduler(
            self.pool, self.counters, max_running=config.max_running, max_batch_tokens=config.max_batch_tokens
        )
        self.scheduler.version = version
        self.max_model_len = min(_longest(model, config), room)
        self._looked = time.monotonic()

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(
        self, prompt: list[int], sampling: Sampling, *, salt: str = "", priority: int = 0, deadline: float | None = None
    ) -> Request:
        """A checked request, not yet in the queue. Safe to call from any thread."""
        limit, vocab = self.max_model_len, self.model.shape.vocab_size
        if not prompt:
            raise RequestInvalid("the prompt is empty; at least one token is needed")
        if len(prompt) >= limit:
            raise context_overflow(str(len(prompt)), limit)
        if min(prompt) < 0 or max(prompt) >= vocab:
            found = next(token for token in prompt if not 0 <= token < vocab)
            raise RequestInvalid(f"the prompt holds token id {found}; the vocabulary is 0 to {vocab - 1}")
        for token, _ in sampling.logit_bias:
            if not 0 <= token < vocab:
                raise RequestInvalid(f"logit_bias: token id {token} is not in the vocabulary, 0 to {vocab - 1}")
        room = min(sampling.max_tokens, limit - len(prompt))
        return Request(prompt, sampling, room, salt, priority, deadline)

    def add(self, request: Request) -> None:
        """Put a request in the queue, or refuse it if the queue is full."""
        self.make_sure_of_room()
        self.enqueue(request)

    def make_sure_of_room(self, arriving: int = 0) -> None:
        """Raises QueueFull where there is none, those included that will soon be in the queue. Safe from any thread."""
        waiting = len(self.scheduler.waiting) + arriving
        if waiting >= self.config.queue:
            self.counters.rejected += 1
            raise QueueFull(f"{waiting} requests wait already, the limit is {self.config.queue}")

    def enqueue(self, request: Request) -> None:
        """Put a request in the queue."""
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self.scheduler.add(request)

    def cancel(self, request: Request) -> bool:
        """Stop a request where it is; False if it has finished by itself."""
        if request.finish is not None:
            return False
        request.finish = "abort"
        self.counters.cancelled += 1
        self.scheduler.finish(request)
        return True

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def everyone(self) -> list[Request]:
        """All requests that have not finished."""
        return [*self.scheduler.running, *(request for _, request in self.scheduler.waiting)]

    # -- stepping ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one step; the requests that got a token or finished."""
        late = self.expire()
        chunks = self.scheduler.schedule()
        if not chunks:
            return late
        ordered, logits = self.runner.run(chunks)
        self._count(chunks)
        for chunk in ordered:
            chunk.request.computed = chunk.stop
        return late + self._sample(ordered, logits)

    def _sample(self, ordered: list[Chunk], logits: torch.Tensor) -> list[Request]:
        requests = [chunk.request for chunk in ordered if chunk.last]
        if len(logits) > len(requests):
            logits = self._score_prompts(ordered, logits)
        if not requests:
            return []
        compiled = self.runner.compiled
        tokens, logprobs = sample(logits, requests, compiled and compiled.sample_tokens)
        if any(map(isnan, logprobs)):  # the cache holds no numbers either: nothing here can be used any more
            raise ProviderError(f"the logits of {self.version} are not numbers; have its weights diverged?")
        for request, token, logprob in zip(requests, tokens, logprobs):
            request.append(token, logprob, self.version)
            if request.finish is not None:
                self.counters.finished += 1
                self.scheduler.finish(request)
        self.counters.sampled_tokens += len(requests)
        return requests

    def _score_prompts(self, ordered: list[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Take prompt logprobs off the logits; what is left is one row for each request that samples."""
        rest: list[torch.Tensor] = []
        for chunk, rows in zip(ordered, logits.split([wanted(chunk) for chunk in ordered])):
            request = chunk.request
            if scored(chunk):
                targets = request.prompt[chunk.start + 1 : chunk.stop + 1]
                found = logprobs_of(rows[: len(targets)], torch.tensor(targets, device=rows.device))
                request.prompt_logprobs[chunk.start + 1 :] = found.tolist()
                top = top_logprobs_of(rows[: len(targets)], request.sampling.prompt_top_logprobs)
                request.prompt_top[chunk.start + 1 :] = top
            if chunk.last:
                rest.append(rows[-1:])
        return torch.cat(rest) if rest else logits[:0]

    def _count(self, chunks: list[Chunk]) -> None:
        counters = self.counters
        new = [chunk.stop - chunk.start for chunk in chunks]
        counters.steps += 1
        counters.computed_tokens += sum(new)
        counters.prefill_chunks += [chunk.last for chunk in chunks].count(False)
        counters.mixed_steps += 0 < new.count(1) < len(new)

    def expire(self) -> list[Request]:
        """Take out the requests whose deadline has passed."""
        now = time.monotonic()
        if now - self._looked < LOOKOUT:
            return []
        self._looked = now
        late = [request for request in self.everyone() if request.deadline is not None and request.deadline < now]
        for request in late:
            spent = now - request.created
            said = (
                f"a request was not finished after {spent:.1f} s in the engine, {len(request.logprobs)} tokens sampled"
            )
            request.error = DeadlineExceeded(said)
            request.finish = "abort"
            self.counters.expired += 1
            self.scheduler.finish(request)
        return late

    # -- weights -------------------------------------------------------------------------------------------------------

    def swap(self, staged: StagedWeights, kv: KV = "recompute") -> None:
        """Change the weights between two steps. No new request ever finds what older weights have computed.

        With `recompute` the running requests start over with the tokens they have; with `keep` they go on with the
        keys and values they have, and share them with nobody.
        """
        running = list(self.scheduler.running)
        if kv == "recompute":
            for request in running:
                self.scheduler.requeue(request)
            self.counters.recomputes += len(running)
        else:
            for request in running:
                request.kv_runs.append((self.version, request.computed))
            self.counters.kept += len(running)
        self.pool.forget(self.scheduler.running)
        apply_weights(self.model.module, staged)
        self.version = self.scheduler.version = staged.version
        self.counters.swaps += 1

    # -- what there is -------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """What the engine holds now."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_blocks": self.pool.capacity,
            "kv_blocks_free": self.pool.free,
            "kv_usage": 1 - self.pool.free / self.pool.capacity,
            "compiled_operators": float(self.runner.compiled is not None),
            "policy_incarnation": self.version.incarnation,
            "policy_step": self.version.step,
        }


def _longest(model: LoadedModel, config: EngineConfig) -> int:
    return min(config.max_model_len or model.shape.max_positions, model.shape.max_positions)


def _blocks(model: LoadedModel, config: EngineConfig) -> int:
    """Blocks of the cache, the one kept back included."""
    size = config.block_size
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // size) + 1
    shape = model.shape
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
    cuda = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if cuda else psutil.virtual_memory().available
    affordable = int(free * config.memory) // (token * size)
    return min(affordable, -(-config.max_running * _longest(model, config) // size)) + 1
