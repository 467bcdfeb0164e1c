"""The engine in a script: prompts in, samples out, in one process and without a server.

`LLM` steps an `EngineCore` in the calling thread until all samples are finished. It is the same core that a server runs
in a thread of its own, so batching, the prefix cache and the logprobs are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch

from ramify.core.config import parse_section
from ramify.core.errors import RequestInvalid
from ramify.core.seeds import derive_seed
from ramify.infer.config import EngineConfig
from ramify.infer.dialects.chat_format import parse_messages
from ramify.infer.engine import Engine
from ramify.infer.gateway.config import SamplingConfig
from ramify.infer.request import EngineRequest, FinishReason, SamplingParams
from ramify.model.render import RenderedPrompt, load_renderer
from ramify.model.resolve import fetch_model
from ramify.model.weights import StagedWeights, get_tensors_for
from ramify.trace import Message, MessageSpan, ModelCall, Trace, TraceBuilder, Turn, Usage, VersionSpan
from ramify.trace.version import PolicyVersion

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One reply that the engine sampled.

    - `text`: the reply, without the tokens that end it.
    - `token_ids`, `logprobs`: the sampled tokens, and their logprobs at the sampling temperature.
    - `finish_reason`: "stop" if the model ended the reply, "length" if `max_tokens` did.
    - `trace`: the prompt and the reply as a trace, to score and to train on.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    trace: Trace


class LLM:
    """A model and its engine, in this process. Use it from one thread.

    `model` is a packaged model, a directory, or a Hugging Face id; `settings` are keys of `[inference]`, such as
    `dtype` or `max_running_requests`.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        path = fetch_model(str(model))
        self._core = Engine.load(str(model), parse_section(EngineConfig, settings, key="inference")).core
        self._renderer = load_renderer(path)

    @property
    def version(self) -> PolicyVersion:
        """The name of the current weights; `step` counts the updates."""
        return self._core.version

    def generate(self, prompts: Sequence[Prompt], *, n: int = 1, **sampling: Any) -> list[list[Sample]]:
        """Return `n` samples for each prompt, as one list per prompt.

        All samples run together. A prompt is computed once for its samples, and so is a prefix that prompts share.

        A prompt is a text, a list of token ids, or a list of messages in OpenAI's format, which the model's chat
        template renders. `sampling` are keys of a source's `sampling`: `temperature`, `top_p`, `top_k`, `min_p`,
        `max_tokens` (by default what the context leaves) and `seed`. Raises RequestInvalid, ContextOverflow or
        ConfigInvalid.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, (int, Mapping)) for prompt in prompts):
            raise RequestInvalid("prompts: expected a list of prompts, got a single one; put it into a list")
        config = parse_section(SamplingConfig, sampling, key="sampling")
        encoded = [self._encode(prompt) for prompt in prompts]
        groups = [
            [self._create_request(prompt, config, f"{index} {number}") for number in range(n)]
            for index, prompt in enumerate(encoded)
        ]
        self._run([request for group in groups for request in group])
        return [[self._read_sample(prompt, item) for item in group] for prompt, group in zip(encoded, groups)]

    def update_weights(self, module: torch.nn.Module) -> PolicyVersion:
        """Copy the weights of a transformers model with the same architecture, and return the new version.

        Raises WeightsRefused if a name or a shape differs.
        """
        version = self.version._replace(step=self.version.step + 1)
        self._core.swap_weights(StagedWeights(version, get_tensors_for(self._core.model.module, module)))
        return version

    def _encode(self, prompt: Prompt) -> "_EncodedPrompt":
        tokenizer, items = self._renderer.tokenizer, cast(Sequence[Any], prompt)
        if isinstance(prompt, str):
            return _EncodedPrompt.from_text(prompt, tokenizer.encode(prompt).ids.tolist())
        if all(isinstance(item, int) for item in items):
            return _EncodedPrompt.from_text(tokenizer.decode(items), list(items))
        parsed = parse_messages(items)
        if parsed.media:
            raise RequestInvalid("messages: images are not supported here; send them to `ramify serve`")
        rendered = self._renderer.render(parsed.messages)
        return _EncodedPrompt(rendered.token_ids.tolist(), rendered.spans, rendered)

    def _create_request(self, prompt: "_EncodedPrompt", sampling: SamplingConfig, position: str) -> EngineRequest:
        """Return the request of one sample; its seed is derived from `sampling.seed` and its `position`."""
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=None if sampling.seed is None else derive_seed(f"{sampling.seed} {position}"),
            max_tokens=sampling.max_tokens or self._core.max_model_len,
            stop_ids=self._core.model.eos_ids.union(self._renderer.stop_ids),
        )
        return self._core.create_request(prompt.token_ids, params)

    def _run(self, requests: Sequence[EngineRequest]) -> None:
        """Step until all requests have finished; if that fails or is interrupted, none of them remains."""
        core = self._core
        try:
            for request in requests:
                core.enqueue(request)
            while core.has_unfinished_requests:
                core.step()
        finally:
            for request in core.list_unfinished_requests():
                core.cancel(request)

    def _read_sample(self, prompt: "_EncodedPrompt", request: EngineRequest) -> Sample:
        token_ids, logprobs = request.token_ids[len(prompt.token_ids) :], request.logprobs
        if prompt.rendered is None:
            text = self._renderer.tokenizer.decode(token_ids, keep_special_tokens=False)
            reply, content_span = Message("assistant", text), None
        else:
            parsed = self._renderer.parse(token_ids, prompt.rendered)
            reply, content_span = parsed.message, parsed.content_span
        assert request.finish_reason is not None
        usage = Usage(len(prompt.token_ids), len(token_ids), request.num_cached_tokens)
        call = ModelCall(
            uuid4().hex,
            served_model=self.version.policy,
            sampling_params={"temperature": request.sampling_params.temperature},
            finish_reason=request.finish_reason,
            usage=usage,
        )
        trace = Trace(id=call.id)
        versions = [VersionSpan(*self.version, len(token_ids))]
        turn = Turn(call, prompt.token_ids, prompt.spans, reply, token_ids, logprobs, content_span, versions)
        TraceBuilder(trace).add_turn(turn)
        return Sample(reply.text, token_ids, logprobs, request.finish_reason, trace)


@dataclass(frozen=True, slots=True, eq=False)
class _EncodedPrompt:
    """The tokens of a prompt and the messages in it; `rendered` is None if no chat template was used."""

    token_ids: list[int]
    spans: Sequence[MessageSpan]
    rendered: RenderedPrompt | None = None

    @classmethod
    def from_text(cls, text: str, token_ids: list[int]) -> "_EncodedPrompt":
        return cls(token_ids, [MessageSpan(Message("user", text), len(token_ids), (0, len(token_ids)))])
