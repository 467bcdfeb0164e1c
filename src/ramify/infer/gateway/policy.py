"""Policies, which sample replies: from a model that takes token ids, or from any chat endpoint.

A policy turns a conversation into a prompt (`prepare`) and samples a reply (`sample`). The session does not depend on
renderers or endpoints; it only uses the number of tokens of a prompt and the spans of its messages.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ramify.core.async_calls import fail_after, retry
from ramify.core.errors import ModelUnsupported, ProviderError, RequestInvalid
from ramify.infer.client import ClientSampling, Completion
from ramify.infer.client.completion import NO_SAMPLED_TOKENS, SampledTokens
from ramify.infer.client.generate_messages import RequestImage
from ramify.infer.client.http_client import ConnectFailed, HttpClient, ResponseLost, ServerBusy, send_request
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.dialects.chat_format import format_message, parse_chat_completion
from ramify.infer.dialects.structured_output import format_constraint
from ramify.infer.gateway.budget import NO_TOKEN_LIMIT
from ramify.infer.gateway.image_description import describe_tool_images
from ramify.infer.gateway.sampling import find_stop
from ramify.model.render import (
    ParsedReply,
    ParseProblem,
    PrefixBreak,
    RenderedPrompt,
    Renderer,
    ReplyConstraint,
    TokenHistory,
    ToolSchema,
)
from ramify.model.render.late_system import accepts_late_system, fold_late_system
from ramify.model.render.outline import ConversationOutline
from ramify.model.render.prompt_images import check_image_count, find_image_parts, has_images
from ramify.model.render.tokenizer import OFFLOAD_MIN_TOKENS, offload
from ramify.trace import Media, Message, MessageSpan, PromptMedia, Usage

NO_TOKENS = np.empty(0, np.int32)
CONNECT_TIMEOUT = 5.0  # seconds to connect to a chat endpoint
CHAT_BACKOFF = 0.25  # seconds before a request to a chat endpoint is sent again; doubled each time


class PreparedPrompt(Struct, frozen=True):
    """A prompt to sample from.

    `new_token_ids` and `spans` are the tokens and messages after the history, in the form of a `Turn`. A policy without
    tokens has no ids and empty spans.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    spans: tuple[MessageSpan, ...]
    new_token_ids: npt.NDArray[np.int32] = NO_TOKENS
    prompt_len: int = 0
    """Number of tokens of the whole prompt."""
    prefix_break: PrefixBreak | None = None
    """Why the history's tokens were not reused; `new_token_ids` and `spans` are then the whole prompt."""
    rendered: RenderedPrompt | None = None
    prefill: str = ""
    """The beginning of the reply, which the client has written; `new_token_ids` ends with its tokens."""
    media: Mapping[str, Media] = {}
    """The images of all messages, by hash."""

    @property
    def prompt_media(self) -> tuple[PromptMedia, ...]:
        """The images of the new messages at their tokens, with their bytes."""
        located = () if self.rendered is None else self.rendered.media
        return tuple(replace(item, media=self.media[item.media.hash]) for item in located)


class PolicyRequest(Struct, frozen=True):
    """A request to sample a reply within `timeout` seconds."""

    prompt: PreparedPrompt
    sampling: ClientSampling
    session: str
    timeout: float
    stop_strings: Sequence[str] = ()  # the reply ends at the token that completes one of them
    clock: StallClock | None = None  # measures how long the engine made no progress, if the policy can observe that
    constraint: ReplyConstraint | None = None  # what the reply must be: JSON or tool calls
    allows_calls: bool = True  # whether tool calls in the reply are parsed; otherwise their text is content


class SampledReply(Struct, frozen=True, eq=False):
    """A sampled reply. `content_span` is the range of `tokens` before the stop token; `history` ends in the reply."""

    message: Message
    finish_reason: str
    usage: Usage
    history: TokenHistory
    tokens: SampledTokens = NO_SAMPLED_TOKENS
    content_span: tuple[int, int] = (0, 0)
    problems: tuple[ParseProblem, ...] = ()
    stop_string: str | None = None  # the client's stop string that ended the sample


class Policy(Protocol):
    """A model that samples replies."""

    name: str  # the model name that replies are recorded with
    trainable: bool  # whether its replies have token ids and logprobs
    max_model_len: int | None  # maximum number of tokens of prompt and reply together, if known

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages in a form that the policy accepts. Equal messages must give equal results.

        `starts_conversation` is False if the messages follow a reply.
        """
        ...

    async def process_images(self, images: Iterable[Media]) -> None:
        """Check and process images before they are rendered; this may take seconds. Raises ImageInvalid."""
        ...

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        prefill: str,
    ) -> PreparedPrompt:
        """Prepare the conversation `history` + `messages`, and the reply if it begins with `prefill`.

        `media` has the media of all its messages, by hash.
        """
        ...

    async def sample(self, request: PolicyRequest) -> SampledReply:
        """Sample a reply."""
        ...


class TokenGenerator(Protocol):
    """The client of a `TokenPolicy`, such as `ramify.infer.client.InferenceClient`."""

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Sample tokens after `prompt`, which contains `images`, within `timeout` seconds."""
        ...


class TokenPolicy:
    """A model behind a token client. Prompts are rendered and replies parsed here, so all tokens are known.

    If `vocab_size` is known, a sample with a larger token id raises ProviderError.
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

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages in a form that the template accepts.

        If it does not write the images of tool results, they are described. If it does not accept late system messages,
        they are folded into others.
        """
        if any(message.role == "tool" and has_images(message) for message in messages) and not self._takes_tool_images:
            messages = describe_tool_images(messages, media)
        if self._accepts_late_system:
            return messages
        return fold_late_system(messages, starts_conversation=starts_conversation)

    @cached_property
    def _takes_tool_images(self) -> bool:
        try:
            return self.renderer.takes_tool_images
        except ModelUnsupported:
            return False

    @cached_property
    def _accepts_late_system(self) -> bool:
        return accepts_late_system(self.renderer)

    async def process_images(self, images: Iterable[Media]) -> None:
        """Process images, so that rendering knows their numbers of tokens. Raises ImageInvalid."""
        cache = self.renderer.image_cache
        if cache is None:
            return
        for image in images:
            if cache.find_layout(image.hash) is None:
                await cache.process_async(image)

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        prefill: str,
    ) -> PreparedPrompt:
        """Render the prompt.

        Raises ImageInvalid if the model takes no images, or if the prompt has more than MAX_PROMPT_IMAGES.
        """
        check_image_count(len(find_image_parts(messages)) + (len(history.images) if history else 0))
        if history is None:
            rendered = self.renderer.render(messages, tools, media=media)
        else:
            rendered = self.renderer.bridge(history, messages, tools, media=media)
        if prefill:
            rendered = self.renderer.prefill(rendered, prefill)
        return PreparedPrompt(
            messages=rendered.messages,
            tools=rendered.tools,
            spans=rendered.spans,
            new_token_ids=rendered.new_token_ids,
            prompt_len=len(rendered.token_ids),
            prefix_break=rendered.prefix_break,
            rendered=rendered,
            prefill=prefill,
            media=media,
        )

    async def sample(self, request: PolicyRequest) -> SampledReply:
        """Sample through the client and parse the reply."""
        rendered, grammar = request.prompt.rendered, None
        assert rendered is not None
        if request.constraint is not None:  # its schema may be long
            grammar = await offload(True, self.renderer.build_grammar, rendered, request.constraint)
        completion = await self.client.generate(
            rendered.token_ids.tolist(),
            replace(request.sampling, stop_ids=self.renderer.stop_ids, grammar=grammar),
            session=request.session,
            timeout=request.timeout,
            clock=request.clock,
            images=self._request_images(request.prompt),
        )
        ids = completion.token_ids
        if completion.finish_reason == "abort":
            raise ProviderError(f"{completion.server} aborted a sample after {len(ids)} tokens")
        if self.vocab_size is not None and len(ids) and int(ids.max()) >= self.vocab_size:
            expected = f"the vocabulary of {self.name} has {self.vocab_size} tokens"
            raise ProviderError(f"{completion.server} sampled token id {ids.max()}; {expected}")
        tokens, parsed, stop_string = await offload(
            len(ids) >= OFFLOAD_MIN_TOKENS, self._parse_sample, completion, request
        )
        return SampledReply(
            message=parsed.message,
            finish_reason="stop" if stop_string is not None else completion.finish_reason,
            usage=Usage(len(rendered.token_ids), len(tokens.token_ids), completion.usage.cached_tokens),
            history=rendered.with_reply(tokens.token_ids, parsed),
            tokens=tokens,
            content_span=parsed.content_span,
            problems=parsed.problems,
            stop_string=stop_string,
        )

    def _request_images(self, prompt: PreparedPrompt) -> list[RequestImage]:
        images = () if prompt.rendered is None else prompt.rendered.images
        cache = self.renderer.image_cache if images else None
        if cache is None:
            return []
        return [
            RequestImage(hash, start, stop, partial(cache.process_async, prompt.media[hash]))
            for hash, start, stop in ((image.media.hash, image.start, image.stop) for image in images)
        ]

    def _parse_sample(
        self, tokens: SampledTokens, request: PolicyRequest
    ) -> tuple[SampledTokens, ParsedReply, str | None]:
        """Truncate the sample after the first stop string and parse it; also return the stop string that ended it."""
        rendered, stop_strings = request.prompt.rendered, request.stop_strings
        assert rendered is not None
        prompt = rendered
        if rendered.allows_calls != request.allows_calls:
            prompt = replace(rendered, allows_calls=request.allows_calls)
        match = find_stop(self.renderer.tokenizer, tokens.token_ids, stop_strings) if stop_strings else None
        if match is None:
            return tokens, self.renderer.parse_after_prefill(tokens.token_ids, prompt), None
        tokens = tokens.truncate(match.num_tokens)
        parsed = self.renderer.parse_after_prefill(tokens.token_ids, prompt)
        message = match.truncate(parsed.message, request.prompt.prefill)
        return tokens, replace(parsed, message=message), match.stop_string


class MessagePolicy:
    """The base of policies that take messages and return no tokens. Their replies are recorded but not trained on."""

    trainable = False
    max_model_len: int | None = None

    def adapt(
        self, messages: Sequence[Message], media: Mapping[str, Media], *, starts_conversation: bool
    ) -> Sequence[Message]:
        """Return the messages unchanged."""
        return messages

    async def process_images(self, images: Iterable[Media]) -> None:
        """Do nothing: the endpoint checks the images that it is sent."""

    def prepare(
        self,
        history: TokenHistory | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        prefill: str,
    ) -> PreparedPrompt:
        """Return the conversation unchanged; its number of tokens is not known. Raises RequestInvalid for a prefill."""
        if prefill:
            raise RequestInvalid("messages: the last message is of the assistant; a chat endpoint cannot continue it")
        conversation = (*(history.messages if history else ()), *messages)
        spans = tuple(MessageSpan(message, 0, (0, 0)) for message in messages)
        return PreparedPrompt(conversation, tuple(tools), spans, media=media)

    def _build_reply(
        self, prepared: PreparedPrompt, message: Message, finish_reason: str, usage: Usage
    ) -> SampledReply:
        history = TokenHistory((*prepared.messages, message), prepared.tools, NO_TOKENS, 0, ConversationOutline())
        return SampledReply(message, finish_reason, usage, history)


class ChatPolicy(MessagePolicy):
    """Any OpenAI-compatible chat endpoint. A request is sent again up to `retries` times after a retryable failure."""

    def __init__(
        self, base_url: str, model: str, api_key: str = "", *, retries: int, backoff: float = CHAT_BACKOFF
    ) -> None:
        self.name, self._retries, self._backoff = model, retries, backoff
        self._http = HttpClient(base_url.rstrip("/"), connect_timeout=CONNECT_TIMEOUT, max_connections=1024)
        if api_key:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    def set_base_url(self, base_url: str) -> None:
        """Send further requests to another address."""
        self._http.base_url = base_url.rstrip("/")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def sample(self, request: PolicyRequest) -> SampledReply:
        """Sample from the endpoint. It does not report progress, so the clock is not used and all time counts."""
        prepared, sampling = request.prompt, request.sampling
        # endpoints do not accept reasoning
        messages = [format_message(message, prepared.media, with_reasoning=False) for message in prepared.messages]
        body: dict[str, Any] = {"model": self.name, "messages": messages}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        optional = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "tools": list(prepared.tools),
            "stop": list(request.stop_strings),
            "max_tokens": sampling.max_tokens if sampling.max_tokens < NO_TOKEN_LIMIT else None,
        }
        body |= {name: value for name, value in optional.items() if value}
        if request.constraint is not None:
            body |= format_constraint(request.constraint)
        async with fail_after(request.timeout, f"a response of {self._http.base_url}"):
            data = await retry(lambda: self._post(body), max_retries=self._retries, backoff=self._backoff)
        return self._build_reply(prepared, *parse_chat_completion(data, str(self._http.base_url)))

    async def _post(self, body: Mapping[str, Any]) -> bytes:
        try:
            return await send_request(self._http, "POST", "/chat/completions", body)
        except (ConnectFailed, ResponseLost) as error:
            raise ProviderError(str(error)) from error
        except ServerBusy as error:
            raise error.error from None
