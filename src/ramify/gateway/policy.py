"""Who answers: a model that takes token ids, or any chat endpoint.

A policy turns a conversation into something to sample from (`prepare`) and samples from it (`sample`). The session
around it knows nothing of renderers or endpoints, only how many tokens a prompt has and where its messages lie.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ramify.client import ClientSampling, Completion
from ramify.client.http_client import ConnectFailed, ResponseLost, ServerBusy, open_client, send_request
from ramify.client.stall_clock import StallClock
from ramify.errors import DeadlineExceeded, ProviderError
from ramify.gateway.budget import NO_TOKEN_LIMIT
from ramify.gateway.image_description import describe_tool_images
from ramify.gateway.openai_format import parse_chat_completion, to_openai_messages
from ramify.gateway.stop_strings import find_stop, truncate_version_runs
from ramify.render import ParsedReply, ParseProblem, PrefixBreak, RenderedPrompt, Renderer, TokenHistory, ToolSchema
from ramify.render.late_system import accepts_late_system, fold_late_system
from ramify.render.offload import OFFLOAD_MIN_TOKENS, offload
from ramify.render.outline import ConversationOutline
from ramify.trace import Media, Message, MessageSpan, Usage, VersionRun

NO_TOKENS = np.empty(0, np.int32)
MAX_CACHED_PROMPTS = 64  # opening prompts a policy remembers


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A conversation ready to be sampled from.

    `added` and `spans` are what stands behind the history's tokens, as a `Turn` wants it; a policy without tokens has
    none, and spans of no length.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    spans: tuple[MessageSpan, ...]
    new_token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    prompt_len: int = 0
    """Tokens of the whole prompt."""
    prefix_break: PrefixBreak | None = None
    """Why the history's tokens could not be kept; `added` and `spans` are then the whole prompt."""
    rendered: RenderedPrompt | None = None
    media: Mapping[str, Media] = field(default_factory=dict[str, Media])


@dataclass(frozen=True, slots=True, eq=False)
class SampledReply:
    """One sample. `body` is the part of `ids` that is text, `history` what a next turn continues."""

    message: Message
    finish_reason: str
    usage: Usage
    history: TokenHistory
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS)
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: tuple[VersionRun, ...] = ()
    content_span: tuple[int, int] = (0, 0)
    problems: tuple[ParseProblem, ...] = ()


class Policy(Protocol):
    """A model that can be asked."""

    @property
    def name(self) -> str: ...

    @property
    def trainable(self) -> bool:
        """Whether it gives token ids and logprobs."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and reply together, where that is known."""
        ...

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages in a form that the policy accepts; `opening` is False if they follow a reply.

        Equal messages must give equal results.
        """
        ...

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        media: Mapping[str, Media] | None = None,
    ) -> PreparedPrompt:
        """The conversation `history` + `messages`; `media` are all that its messages show."""
        ...

    async def sample(
        self,
        prepared: PreparedPrompt,
        sampling: ClientSampling,
        *,
        session: str,
        timeout: float,
        stop_strings: Sequence[str] = (),
        clock: StallClock | None = None,
    ) -> SampledReply:
        """Take one sample, which ends with the token that completes one of the strings `stop`.

        `clock` measures how long the engine made no progress, if the policy can tell.
        """
        ...


class TokenGenerator(Protocol):
    """What a `TokenPolicy` needs of a client; `ramify.client.Client` is one."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
    ) -> Completion: ...


class ParsedSample(NamedTuple):
    """The tokens of a sample, the message that was parsed from them, and whether a stop string ended it."""

    token_ids: npt.NDArray[np.int32]
    parsed: ParsedReply
    is_stopped: bool


class TokenPolicy:
    """A model behind the token client, rendered and read here: every token and logprob is known.

    The last opening prompts are remembered: all attempts at a task begin with the same one. If `vocabulary_size` is
    known, a sample with a token id beyond it is a ProviderError.
    """

    trainable = True

    def __init__(
        self,
        client: TokenGenerator,
        renderer: Renderer,
        name: str,
        *,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.client, self.renderer, self.name = client, renderer, name
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self._first_prompts: OrderedDict[tuple[Message, ...], RenderedPrompt] = OrderedDict()

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Describe the images of tool results, and fold late system messages if the template does not accept them."""
        described = describe_tool_images(messages, media)
        return (
            described
            if self._accepts_late_system
            else fold_late_system(described, starts_conversation=starts_conversation)
        )

    @cached_property
    def _accepts_late_system(self) -> bool:
        return accepts_late_system(self.renderer)

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        media: Mapping[str, Media] | None = None,
    ) -> PreparedPrompt:
        """The prompt; a renderer that shows no images refuses messages that hold some."""
        if history is None:
            rendered = self._render_first_prompt(tuple(messages), tuple(tools))
        else:
            rendered = self.renderer.bridge(history, messages, tools)
        return PreparedPrompt(
            messages=rendered.messages,
            tools=rendered.tools,
            spans=rendered.spans,
            new_token_ids=rendered.new_token_ids,
            prompt_len=len(rendered.token_ids),
            prefix_break=rendered.prefix_break,
            rendered=rendered,
        )

    async def sample(
        self,
        prepared: PreparedPrompt,
        sampling: ClientSampling,
        *,
        session: str,
        timeout: float,
        stop_strings: Sequence[str] = (),
        clock: StallClock | None = None,
    ) -> SampledReply:
        """Ask the client and read what it sampled."""
        rendered = prepared.rendered
        assert rendered is not None
        wanted = replace(sampling, stop_ids=self.renderer.stop_ids)
        prompt = rendered.token_ids.tolist()
        done = await self.client.generate(prompt, wanted, session=session, timeout=timeout, clock=clock)
        if done.finish_reason == "abort":
            raise ProviderError(f"{done.server} gave up a sample after {len(done.token_ids)} tokens")
        if self.vocab_size is not None and len(done.token_ids) and int(done.token_ids.max()) >= self.vocab_size:
            expected = f"the vocabulary of {self.name} has {self.vocab_size} tokens"
            raise ProviderError(f"{done.server} sampled token id {done.token_ids.max()}; {expected}")
        ids, parsed, stopped = await offload(
            len(done.token_ids) >= OFFLOAD_MIN_TOKENS, self._parse_sample, done.token_ids, rendered, stop_strings
        )
        return SampledReply(
            message=parsed.message,
            finish_reason="stop" if stopped else done.finish_reason,
            usage=Usage(len(rendered.token_ids), len(ids), done.usage.cached_tokens),
            history=rendered.with_reply(ids, parsed),
            token_ids=ids,
            logprobs=done.logprobs[: len(ids)],
            versions=truncate_version_runs(done.version_runs, len(ids)),
            content_span=parsed.content_span,
            problems=parsed.problems,
        )

    def _parse_sample(
        self, sampled_ids: npt.NDArray[np.int32], prompt: RenderedPrompt, stop_strings: Sequence[str]
    ) -> ParsedSample:
        """Cut the sample behind the first stop string and parse it."""
        cut = find_stop(self.renderer.tokenizer, sampled_ids, stop_strings) if stop_strings else None
        if cut is None:
            return ParsedSample(sampled_ids, self.renderer.parse(sampled_ids, prompt), False)
        ids = sampled_ids[: cut.num_tokens]
        parsed = self.renderer.parse(ids, prompt)
        return ParsedSample(ids, replace(parsed, message=cut.truncate(parsed.message)), True)

    def _render_first_prompt(self, messages: tuple[Message, ...], tools: tuple[ToolSchema, ...]) -> RenderedPrompt:
        known = self._first_prompts.get(messages)
        if known is None or known.tools != tools:
            known = self._first_prompts[messages] = self.renderer.render(messages, tools)
            if len(self._first_prompts) > MAX_CACHED_PROMPTS:
                self._first_prompts.popitem(last=False)
        self._first_prompts.move_to_end(messages)
        return known


class ChatPolicy:
    """Any OpenAI-compatible chat endpoint. It gives no tokens, so its replies are recorded but cannot be trained on."""

    trainable = False

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        *,
        max_model_len: int | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        self.name, self.max_model_len = model, max_model_len
        self._http = open_client(base_url.rstrip("/"), connect_timeout=connect_timeout, max_connections=1024)
        if api_key:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    async def close(self) -> None:
        """End the connections."""
        await self._http.aclose()

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages unchanged: the endpoint refuses what it does not accept."""
        return messages

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        media: Mapping[str, Media] | None = None,
    ) -> PreparedPrompt:
        """The conversation as it is; how many tokens it has, the endpoint will say."""
        whole = (*(history.messages if history else ()), *messages)
        spans = tuple(MessageSpan(message, 0, (0, 0)) for message in messages)
        return PreparedPrompt(whole, tuple(tools), spans, media=media or {})

    async def sample(
        self,
        prepared: PreparedPrompt,
        sampling: ClientSampling,
        *,
        session: str,
        timeout: float,
        stop_strings: Sequence[str] = (),
        clock: StallClock | None = None,
    ) -> SampledReply:
        """Ask the endpoint. It does not report progress, so `clock` is not used and all time counts."""
        body: dict[str, Any] = {"model": self.name, "messages": to_openai_messages(prepared.messages, prepared.media)}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        optional = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "tools": list(prepared.tools),
            "stop": list(stop_strings),
            "max_tokens": sampling.max_tokens if sampling.max_tokens < NO_TOKEN_LIMIT else None,
        }
        body |= {name: value for name, value in optional.items() if value}
        try:
            async with asyncio.timeout(timeout):
                data = await send_request(self._http, "POST", "/chat/completions", body)
        except TimeoutError as error:
            raise DeadlineExceeded(f"waited {timeout:g} s for an answer of {self._http.base_url}") from error
        except (ConnectFailed, ResponseLost) as error:
            raise ProviderError(str(error)) from error
        except ServerBusy as error:
            raise error.error from None
        message, finish, usage = parse_chat_completion(data, str(self._http.base_url))
        history = TokenHistory((*prepared.messages, message), prepared.tools, NO_TOKENS, 0, ConversationOutline())
        return SampledReply(message, finish, usage, history)
