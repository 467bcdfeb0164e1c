"""The session of a rollout. All model calls go through it, and only it adds to the trace.

The harness in this process and clients over HTTP use the same path. A call finds the reply that it continues, so that
sampled tokens are reused unchanged; reserves its budget; samples; and is
recorded before the reply is returned.
"""

import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ramify.core.async_calls import fail_after
from ramify.core.errors import (
    EngineIncompatible,
    EnvironmentFault,
    ImageInvalid,
    ModelNotFound,
    ProviderError,
    RequestInvalid,
    TemplateRefused,
)
from ramify.infer.client import ClientSampling
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.dialects.message_parser import remove_prefill
from ramify.infer.dialects.model_call import ModelReply, ModelRequest, ReplyFinishReason
from ramify.infer.dialects.response_store import ResponseStore
from ramify.infer.gateway.budget import BudgetGrant, RolloutBudget
from ramify.infer.gateway.canonical import check_num_chars, count_chars, encode_canonical
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX, RolloutLimits, SamplingConfig
from ramify.infer.gateway.conversation_trie import CallIdRegistry, ConversationTrie, TrieNode
from ramify.infer.gateway.main_calls import RecordedCall
from ramify.infer.gateway.policy import Policy, PolicyRequest, PreparedPrompt, SampledReply
from ramify.infer.gateway.recorder import TraceRecorder
from ramify.infer.gateway.request_dedup import RECONNECT_TIMEOUT, RequestDeduplicator, SharedCall
from ramify.infer.gateway.request_quota import QuotaSettings, RequestQuota
from ramify.infer.gateway.sampling import derive_call_seed, parse_stop_strings, resolve_sampling, sampling_to_dict
from ramify.infer.gateway.served_tools import ServedTools
from ramify.model.render import ReplyConstraint, TokenHistory
from ramify.model.render.prompt_images import PromptImage, check_image_count, find_image_parts, without_data
from ramify.model.render.tokenizer import OFFLOAD_MIN_CHARS, offload
from ramify.trace import Media, Message, ModelCall, Trace

MAX_REFUSALS = 50  # distinct refusals that a trace keeps
MAX_REFUSAL_CHARS = 1000  # of a refusal's message
MAX_IGNORED_FIELDS = 50  # names of ignored fields that a trace keeps
MAX_IGNORED_FIELD_CHARS = 100  # of such a name
DEFAULT_QUOTA = QuotaSettings()


class RolloutSession:
    """The model calls of one rollout.

    `models` are other policies by the model name that a client requests; every other name selects `policy` or, if
    `serves_any_model` is False, raises ModelNotFound. By default `response_store` is the session's own.
    `call_timeout` is the maximum time of one call in seconds, including all waiting.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        *,
        sampling: SamplingConfig,
        limits: RolloutLimits,
        models: Mapping[str, Policy] | None = None,
        serves_any_model: bool = True,
        response_store: ResponseStore | None = None,
        is_training: bool = False,
        seed: int | None = None,
        call_timeout: float = 600.0,
        reconnect_timeout: float = RECONNECT_TIMEOUT,
        quota: QuotaSettings = DEFAULT_QUOTA,
    ) -> None:
        if is_training:
            sampling.check_trainable()
            if not policy.trainable:
                raise EngineIncompatible(f"{policy.name} returns no token ids and logprobs, so it cannot be trained on")
        self.trace, self.policy, self.sampling = trace, policy, sampling
        self.models, self._serves_any_model = dict(models or {}), serves_any_model
        self.is_training, self.call_timeout = is_training, call_timeout
        self.seed = sampling.seed if seed is None else seed
        self.on_reply: Callable[[ModelReply], None] | None = None
        """Called with every recorded reply."""
        self.is_agent_running = True
        """Whether the agent is running. The rollout sets it to False while hooks make the calls."""
        self.tools: ServedTools | None = None
        """The tools that the agent may call over HTTP. The rollout sets them before the agent starts."""
        self.recorded_calls: list[RecordedCall] = []
        """The recorded calls of the trainable policy, with what decides whether they are trained on."""
        self.quota = RequestQuota(quota)
        """What the requests of clients may hold and use at once."""
        self.clock = StallClock()
        """Measures how long calls waited for an engine that made no progress."""
        self.budget = RolloutBudget(limits)
        """The turns and tokens that the rollout has used and may still use."""
        self._recorder = TraceRecorder(trace)
        self._call_ids = CallIdRegistry()
        self.response_store = ResponseStore() if response_store is None else response_store
        """The replies and conversations to which requests of the Responses API may refer."""
        self._trie_by_policy: dict[int, ConversationTrie] = {}  # by id of the policy
        self._reply_by_node: dict[int, TrieNode] = {}
        self._node_by_call: dict[str, int] = {}
        self._deduplicator = RequestDeduplicator(reconnect_timeout, f"{REQUEST_TASK_PREFIX}{trace.id}")
        self._media: dict[str, Media] = {}
        self._num_calls = 0
        self._num_running, self._busy_since, self._busy_seconds = 0, 0.0, 0.0

    @cached_property
    def secret(self) -> str:
        """The API key with which clients of the gateway select this session."""
        return secrets.token_urlsafe(32)

    # -- public calls --------------------------------------------------------------------------------------------------

    async def generate(self, request: ModelRequest) -> ModelReply:
        """Sample and record a reply.

        Raises BudgetExceeded or ContextOverflow if a limit is reached, and another RamifyError if the call fails.
        """
        try:
            await self.check_and_process_images(request)
            return await self._start_call(request, *self._find_or_insert_position(request))
        except ImageInvalid as error:
            # Only the harness and hooks call this function: the image is one of the task, of a tool or of a user.
            raise EnvironmentFault(f"the environment sent an image that cannot be used: {error.message}") from error

    async def check_and_process_images(self, request: ModelRequest) -> None:
        """Check and process the new images of a request. To be called before `start_call` and `keeps_history`.

        Raises ImageInvalid if an image cannot be used, or if there are too many of them. Images that the policy only
        gets described do not count.
        """
        if not request.media:
            return
        policy, messages, media = self._resolve_policy_input(request)
        new_images = [image for hash, image in media.items() if hash not in self._media]
        if not new_images:
            return
        check_image_count(len(find_image_parts(messages)))
        num_bytes = sum(len(image.data) for image in (*self._media.values(), *new_images))
        if num_bytes > (limit := self.quota.settings.max_image_bytes):
            raise ImageInvalid(f"image: a rollout may have {limit} bytes of images; this makes {num_bytes}")
        async with fail_after(self.call_timeout, "processing the images of a request"):
            await policy.process_images(new_images)

    def start_call(self, request: ModelRequest) -> SharedCall[ModelReply]:
        """Start a call, or join it if this request is a retry. The caller must call `leave` when it stops waiting."""
        policy, position = self._find_or_insert_position(request)
        constraint = [getattr(request.constraint, field.name, None) for field in fields(ReplyConstraint)]
        options = [request.tools, request.sampling_overrides, request.prefill, request.allows_calls, constraint]
        fingerprint = (id(policy), id(position), encode_canonical(options))
        return self._deduplicator.join_or_start(
            request, fingerprint, lambda: self._start_call(request, policy, position)
        )

    async def count_prompt_tokens(self, request: ModelRequest) -> int:
        """Return the number of prompt tokens of a request; for a policy without tokens, estimate it from the text.

        Raises ContextOverflow if the text is too long to be rendered.
        """
        await self.check_and_process_images(request)
        async with fail_after(self.call_timeout, "counting the tokens of a request"):
            prepared = await self._prepare_only(request)
        if prepared.rendered is not None:
            return prepared.prompt_len
        num_chars = sum(len(message.text) for message in prepared.messages)
        return (num_chars + len(encode_canonical(request.tools))) // 4 + 4 * len(prepared.messages)

    async def keeps_history(self, request: ModelRequest) -> bool:
        """Return whether a request continues the tokens of its history.

        A chat template may rewrite earlier messages, or refuse the order of the new ones.
        """
        try:
            return (await self._prepare_only(request)).prefix_break is None
        except TemplateRefused:
            return False

    def check_num_values(self, num_values: int) -> None:
        """Raise ContextOverflow if a body has more JSON values than fit the context of any policy as characters.

        It is checked before the body is parsed, because a small value needs many times its bytes in memory.
        """
        check_num_chars(num_values, map(self._get_max_path_tokens, (self.policy, *self.models.values())))

    def continue_reply(self, request: ModelRequest, call_id: str) -> ModelRequest:
        """Return a request whose messages follow an earlier reply, given by the id of its call.

        Raises RequestInvalid if neither the session nor its store has the reply.
        """
        if call_id in self._node_by_call:
            return replace(request, parent_node=self._node_by_call[call_id])
        stored = self.response_store.find_reply(call_id)
        if stored is None or not stored.parsed.request.messages:
            raise RequestInvalid(f"this session has no reply {call_id!r}")
        earlier, reply = stored.parsed.request, stored.reply.message
        messages = (*earlier.messages, reply, *request.messages)
        return replace(request, messages=messages, media={**earlier.media, **request.media})

    def record_refusal(self, path: str, status: int, name: str, message: str) -> None:
        """Record in the trace that a request was refused. Equal refusals are counted."""
        refusals = [dict(refusal) for refusal in self.trace.info.get("refusals", [])]
        entry = {"path": path, "status": status, "name": name, "message": message[:MAX_REFUSAL_CHARS]}
        same = next((refusal for refusal in refusals if refusal == {**entry, "count": refusal["count"]}), None)
        if same is None:
            refusals.append({**entry, "count": 1})
        else:
            same["count"] += 1
        self.trace.info["refusals"] = refusals[:MAX_REFUSALS]

    def record_ignored_fields(self, names: Sequence[str]) -> None:
        """Count in the trace how often a request had each of these fields, which have no effect."""
        if names:
            counts: dict[str, int] = dict(self.trace.info.get("ignored_fields", {}))
            for name in (name[:MAX_IGNORED_FIELD_CHARS] for name in names):
                if name in counts or len(counts) < MAX_IGNORED_FIELDS:
                    counts[name] = counts.get(name, 0) + 1
            self.trace.info["ignored_fields"] = counts

    def close(self) -> None:
        """Cancel the calls that are still running for clients."""
        self._deduplicator.cancel_all()

    # -- usage ---------------------------------------------------------------------------------------------------------

    @property
    def num_turns(self) -> int:
        """Number of recorded calls."""
        return self.budget.num_turns

    @property
    def exhausted_limit(self) -> str | None:
        """The name of the limit ("max_turns", ...) that allows no further call, or None."""
        return self.budget.exhausted_limit

    @property
    def max_path_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt and its reply: the smaller of `seq_len` and the model's length."""
        return self._get_max_path_tokens(self.policy)

    def _get_max_path_tokens(self, policy: Policy) -> int | None:
        limits = (self.budget.limits.seq_len, policy.max_model_len)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def model_seconds(self) -> float:
        """Seconds during which at least one call was running."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._num_running else 0.0)

    # -- one call ------------------------------------------------------------------------------------------------------

    def _get_policy(self, model: str) -> Policy:
        if not self._serves_any_model and model not in (*self.models, self.policy.name):
            expected = " or ".join(dict.fromkeys((self.policy.name, *self.models)))
            raise ModelNotFound(f"model: {model!r:.200} is not served here; expected {expected}, as /v1/models lists")
        return self.models.get(model, self.policy)

    def _resolve_policy_input(self, request: ModelRequest) -> tuple[Policy, Sequence[Message], Mapping[str, Media]]:
        """Return the policy of a request, its messages in the form that the policy accepts, and their media.

        Media of the request that these messages do not contain are left out.
        """
        policy = self._get_policy(request.model)
        available = {**self._media, **request.media} if request.media else self._media
        messages = policy.adapt(request.messages, available, starts_conversation=request.parent_node is None)
        hashes = {part.hash for part in find_image_parts(messages)} if request.media else set[str]()
        return policy, messages, {hash: media for hash, media in request.media.items() if hash in hashes}

    def _find_or_insert_position(self, request: ModelRequest) -> tuple[Policy, TrieNode]:
        """Return the policy of a request, and the node of its conversation trie after the request's messages.

        New messages are inserted, and the request's media are stored. Raises RequestInvalid or ContextOverflow.
        """
        policy = self._get_policy(request.model)
        check_num_chars(count_chars(request), [self._get_max_path_tokens(policy)])
        _, messages, media = self._resolve_policy_input(request)
        trie = self._trie_by_policy.get(id(policy))
        if trie is None:
            trie = self._trie_by_policy[id(policy)] = ConversationTrie()
        self._media.update(media)
        if request.parent_node is None:
            if not messages:
                raise RequestInvalid("messages: expected at least one message, found none")
            return policy, trie.find_or_insert(trie.root, messages, request.tools)
        reply = self._reply_by_node.get(request.parent_node)
        if reply is None:
            raise RequestInvalid(f"parent_node: node {request.parent_node} is not a reply in this session")
        if reply.root is trie.root:
            return policy, trie.find_or_insert(reply, messages, request.tools)
        return policy, trie.find_or_insert(trie.root, [*reply.messages_after(None), *messages], request.tools)

    async def _prepare_only(self, request: ModelRequest) -> PreparedPrompt:
        """Return the prompt of a request that is not sampled; the conversation trie is left unchanged."""
        policy, position = self._find_or_insert_position(request)
        try:
            return await self._prepare(policy, position, request)
        finally:
            position.remove_unused()

    async def _prepare(self, policy: Policy, position: TrieNode, request: ModelRequest) -> PreparedPrompt:
        """Render the prompt of a request: a long one in a thread, and for a client within the quota."""
        reply = position.last_reply
        history = None if reply is None else self._get_history(policy, reply)
        messages = position.messages_after(reply)
        num_chars = count_chars(request) if policy.trainable else 0
        prepare = partial(policy.prepare, history, messages, request.tools, self._media, request.prefill)
        is_large = num_chars >= OFFLOAD_MIN_CHARS
        if request.is_remote:
            return await self.quota.run(is_large, num_chars, prepare)
        return await offload(is_large, prepare)

    def _get_history(self, policy: Policy, reply: TrieNode) -> TokenHistory:
        """Return the history up to `reply`, cached or rebuilt from the trace."""
        if reply.history is None:
            sampled = self.trace.nodes[reply.trace_node].sampled_span
            ids = self.trace.graph.path_tokens(reply.trace_node)
            images = [
                PromptImage(without_data(self._media[hash]), start, stop)
                for start, stop, hash in self.trace.graph.path_media(reply.trace_node)
            ]
            history = TokenHistory.build(
                reply.messages_after(None), reply.tools, ids, num_sampled=sampled[1] - sampled[0], images=images
            )
            self._trie_by_policy[id(policy)].cache_history(reply, history)
            return history
        return reply.history

    def _start_call(self, request: ModelRequest, policy: Policy, position: TrieNode) -> Coroutine[Any, Any, ModelReply]:
        """Return the coroutine of a call, and keep its position in the conversation trie until it ends."""
        position.num_running += 1
        return self._run_call(request, policy, position)

    async def _run_call(self, request: ModelRequest, policy: Policy, position: TrieNode) -> ModelReply:
        start, by_agent = time.time(), self.is_agent_running
        self._start_timer()
        try:
            async with fail_after(self.call_timeout, "a model call"):
                sampling, stop_strings = (
                    self._resolve_sampling(request, position),
                    parse_stop_strings(request.sampling_overrides),
                )
                prepared = await self._prepare(policy, position, request)
                grant = await self._reserve_budget(policy, prepared, position, sampling)
                try:
                    if grant.output_tokens < sampling.max_tokens:
                        sampling = replace(sampling, max_tokens=grant.output_tokens)
                    sample_request = PolicyRequest(
                        prepared,
                        sampling,
                        self.trace.id,
                        self.call_timeout,
                        stop_strings,
                        self.clock,
                        request.constraint,
                        request.allows_calls,
                    )
                    sampled = await policy.sample(sample_request)
                    _check_logprobs_finite(policy, sampled)
                    self._num_calls += 1
                    call = ModelCall(
                        f"{self.trace.id}-{self._num_calls}",
                        request.model,
                        policy.name,
                        sampling_to_dict(sampling, stop_strings),
                        _finish_reason(sampled),
                        sampled.usage,
                        start,
                        time.time(),
                    )
                    reply = self._record_reply(policy, position, prepared, sampled, call, grant, request.fork_reason)
                    if policy.trainable and policy is self.policy:
                        self._record_call(request, position, reply.node, by_agent=by_agent)
                        if request.constraint is not None:
                            self._recorder.record_structured_output(reply.node)
                    return reply
                finally:
                    self.budget.release(grant)
        finally:
            position.num_running -= 1
            position.remove_unused()
            self._stop_timer()

    def _record_call(self, request: ModelRequest, position: TrieNode, node: int, *, by_agent: bool) -> None:
        """Record what decides whether a call is trained on."""
        reply = position.last_reply
        initial_messages = tuple(position.messages_after(None)) if reply is None else ()
        previous_node = None if reply is None else reply.trace_node
        self.recorded_calls.append(
            RecordedCall(node, initial_messages, previous_node, bool(request.tools), request.is_remote, by_agent)
        )

    def _resolve_sampling(self, request: ModelRequest, position: TrieNode) -> ClientSampling:
        seed = derive_call_seed(self.seed, position.digest, position.num_calls)
        position.num_calls += 1
        return resolve_sampling(self.sampling, request.sampling_overrides, is_training=self.is_training, seed=seed)

    async def _reserve_budget(
        self, policy: Policy, prepared: PreparedPrompt, position: TrieNode, sampling: ClientSampling
    ) -> BudgetGrant:
        def count_new_tokens() -> int:
            is_counted = self.budget.limits_input and prepared.rendered is not None
            return self._recorder.count_new_tokens(prepared, position) if is_counted else 0

        prompt_len = prepared.prompt_len or (position.last_reply.num_tokens if position.last_reply else 0)
        return await self.budget.reserve(
            count_new_tokens, max_tokens=sampling.max_tokens, prompt_len=prompt_len, max_model_len=policy.max_model_len
        )

    def _record_reply(
        self,
        policy: Policy,
        position: TrieNode,
        prepared: PreparedPrompt,
        sampled: SampledReply,
        call: ModelCall,
        grant: BudgetGrant,
        fork_reason: str,
    ) -> ModelReply:
        """Record a call in the trace, the budget and the trie, before the reply is returned."""
        sampled = self._call_ids.make_unique(sampled, position)
        trainable = policy.trainable and policy is self.policy
        recorded = self._recorder.record_turn(
            position, prepared, sampled, call, self._media, trainable=trainable, reason=fork_reason
        )
        self.budget.release(
            grant, num_turns=1, input_tokens=recorded.input_tokens, output_tokens=recorded.output_tokens
        )
        trie = self._trie_by_policy[id(policy)]
        self._reply_by_node[recorded.node] = trie.insert_reply(
            position, sampled.message, recorded.node, sampled.history, recorded.path_len
        )
        self._node_by_call[call.id] = recorded.node
        reply = ModelReply(
            remove_prefill(sampled.message, prepared.prefill),
            _finish_reason(sampled),
            sampled.usage,
            recorded.node,
            call.id,
            sampled.problems,
            sampled.stop_string,
        )
        if self.on_reply is not None:
            self.on_reply(reply)
        return reply

    def _start_timer(self) -> None:
        if not self._num_running:
            self._busy_since = time.monotonic()
        self._num_running += 1

    def _stop_timer(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._busy_seconds += time.monotonic() - self._busy_since


def _check_logprobs_finite(policy: Policy, sampled: SampledReply) -> None:
    """Raise ProviderError if a logprob is not finite, because such a sample cannot be trained on."""
    logprobs = sampled.tokens.logprobs
    is_finite = np.isfinite(logprobs)
    if not is_finite.all():
        index = int(is_finite.argmin())
        raise ProviderError(
            f"{policy.name} gave logprob {logprobs[index]:g} for token {index} of its sample: not finite"
        )


def _finish_reason(sampled: SampledReply) -> ReplyFinishReason:
    if sampled.finish_reason == "length":
        return "length"
    return "tool_calls" if sampled.message.tool_calls else "stop"
