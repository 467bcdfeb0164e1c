"""A rollout's recorder: every model call goes through here, and the trace grows nowhere else.

The harness in this process and clients over HTTP take the same path. A call finds the reply it continues, so that
tokens once sampled are used verbatim; takes its share of the budget; samples, again if the failure is one that passes;
and is recorded before anybody sees the answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ramify.client import ClientSampling
from ramify.client.stall_clock import StallClock
from ramify.errors import DeadlineExceeded, ProviderError, RamifyError, RequestInvalid, TokensRequired
from ramify.gateway.budget import BudgetGrant, RolloutBudget
from ramify.gateway.canonical import encode_canonical
from ramify.gateway.config import RolloutLimits, SamplingConfig
from ramify.gateway.conversation_trie import ConversationTrie, TrieNode
from ramify.gateway.main_calls import RecordedCall
from ramify.gateway.model_call import ModelReply, ModelRequest, ReplyFinishReason
from ramify.gateway.policy import Policy, PreparedPrompt, SampledReply
from ramify.gateway.recorder import TraceRecorder
from ramify.gateway.request_dedup import RequestDeduplicator, SharedCall
from ramify.gateway.sampling import derive_call_seed, parse_stop_strings, resolve_sampling, sampling_to_dict
from ramify.render import TokenHistory
from ramify.trace import Media, ModelCall, Trace

RETRY_BACKOFF = 0.25  # seconds before a failed call is made again; doubled each time
MAX_REFUSALS = 50  # different refusals that a trace keeps
MAX_REFUSAL_CHARS = 1000  # characters of a refusal's message that are kept
ABANDON_AFTER = (
    5.0  # seconds a call goes on when its client has hung up: about as long as SDKs wait before they ask again
)


class RolloutSession:
    """One rollout. `models` are other models by the name a client asks for; every other name is the policy's.

    `deadline` is what one call may take in seconds, retries and waiting included.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        *,
        sampling: SamplingConfig,
        limits: RolloutLimits,
        models: Mapping[str, Policy] | None = None,
        is_training: bool = False,
        seed: int | None = None,
        call_timeout: float = 600.0,
        max_retries: int = 3,
        abandon_after: float = ABANDON_AFTER,
    ) -> None:
        if is_training:
            sampling.check_trainable()
            if not policy.trainable:
                raise TokensRequired(f"{policy.name} gives no token ids and logprobs, so it cannot be trained on")
        self.trace, self.policy, self.sampling = trace, policy, sampling
        self.models = dict(models or {})
        self.is_training, self.call_timeout, self.max_retries = is_training, call_timeout, max_retries
        self.seed = sampling.seed if seed is None else seed
        self.secret = secrets.token_urlsafe(32)
        self.failures: list[RamifyError] = []
        """Calls that failed, for whoever runs an agent that does not tell."""
        self.on_reply: Callable[[ModelReply], None] | None = None
        """Called with every reply that was recorded."""
        self.is_agent_running = True
        """Whether the agent runs; False before and after, when calls are made by hooks."""
        self.recorded_calls: list[RecordedCall] = []
        """The recorded calls of the trainable policy, with what decides whether they are trained."""
        self.clock = StallClock()
        """Measures how long its calls waited for an engine that made no progress."""
        self._budget = RolloutBudget(limits)
        self._recorder = TraceRecorder(trace)
        self._trie_by_policy: dict[int, ConversationTrie] = {}  # by policy
        self._reply_by_node: dict[int, TrieNode] = {}  # by node
        self._node_by_call: dict[str, int] = {}  # by call
        self._deduplicator = RequestDeduplicator(abandon_after)
        self._media: dict[str, Media] = {}
        self._num_calls = 0
        self._num_running, self._busy_since, self._busy_seconds = 0, 0.0, 0.0

    # -- asking --------------------------------------------------------------------------------------------------------

    async def generate(self, request: ModelRequest) -> ModelReply:
        """The policy's reply, recorded.

        Raises BudgetExceeded or ContextOverflow when the policy has used up its room, and what went wrong by its name
        when the call could not be made.
        """
        if request.idempotency_key is None and not request.retry_count:
            return await self._run_call(request, *self._locate(request))
        asking = self.start_call(request)
        try:
            reply = await asking.wait()
        except BaseException:
            asking.leave(delivered=False)
            raise
        asking.leave(delivered=True)
        return reply

    def start_call(self, request: ModelRequest) -> SharedCall:
        """The call for a client that may hang up and ask again; whoever gets it says `leave` in the end."""
        policy, end = self._locate(request)
        same = (id(policy), id(end), encode_canonical([request.tools, request.sampling_overrides]))
        return self._deduplicator.join_or_start(request, same, lambda: self._run_call(request, policy, end))

    def count_prompt_tokens(self, request: ModelRequest) -> int:
        """The tokens of the prompt this request would make; for a policy without tokens a guess from its length."""
        policy, end = self._locate(request)
        prepared = self._prepare(policy, end, request)
        if prepared.rendered is not None:
            return prepared.prompt_len
        said = sum(len(message.text) for message in prepared.messages)
        return (said + len(encode_canonical(request.tools))) // 4 + 4 * len(prepared.messages)

    def get_node(self, call_id: str) -> int:
        """The node of an earlier reply, by its call's id."""
        if call_id not in self._node_by_call:
            raise RequestInvalid(f"no reply {call_id!r} is known in this session")
        return self._node_by_call[call_id]

    def record_refusal(self, path: str, status: int, name: str, message: str) -> None:
        """Record in the trace that a client was refused. Equal refusals are counted; at most `REFUSALS` are kept."""
        refusals = list(self.trace.info.get("refusals", []))
        entry = {"path": path, "status": status, "name": name, "message": message[:MAX_REFUSAL_CHARS]}
        for at, known in enumerate(refusals):
            if {**known, "count": 0} == {**entry, "count": 0}:
                refusals[at] = {**entry, "count": known["count"] + 1}
                break
        else:
            refusals.append({**entry, "count": 1})
        self.trace.info["refusals"] = refusals[:MAX_REFUSALS]

    def close(self) -> None:
        """Give up calls that are still running for clients."""
        self._deduplicator.cancel_all()

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def num_turns(self) -> int:
        """Calls that were recorded."""
        return self._budget.num_turns

    @property
    def exhausted_limit(self) -> str | None:
        """The limit that leaves no further call ("max_turns", ...), if one does."""
        return self._budget.exhausted_limit

    @property
    def input_tokens(self) -> int:
        return self._budget.input_tokens

    @property
    def output_tokens(self) -> int:
        return self._budget.output_tokens

    @property
    def model_seconds(self) -> float:
        """Seconds during which at least one call was running."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._num_running else 0.0)

    # -- one call ------------------------------------------------------------------------------------------------------

    def _locate(self, request: ModelRequest) -> tuple[Policy, TrieNode]:
        """Who answers, and the place in its conversations that the request leads to."""
        policy = self.models.get(request.model, self.policy)
        talk = self._trie_by_policy.get(id(policy))
        if talk is None:
            talk = self._trie_by_policy[id(policy)] = ConversationTrie()
        self._media.update(request.media)
        messages = policy.adapt(request.messages, self._media, starts_conversation=request.parent_node is None)
        if request.parent_node is None:
            if not messages:
                raise RequestInvalid("messages: at least one is needed")
            return policy, talk.find_or_insert(talk.root, messages, request.tools)
        said = self._reply_by_node.get(request.parent_node)
        if said is None:
            raise RequestInvalid(f"after: node {request.parent_node} is no reply of this session")
        if said.root is talk.root:
            return policy, talk.find_or_insert(said, messages, request.tools)
        return policy, talk.find_or_insert(talk.root, [*said.messages_after(None), *messages], request.tools)

    def _prepare(self, policy: Policy, position: TrieNode, request: ModelRequest) -> PreparedPrompt:
        last = position.last_reply
        history = None if last is None else self._get_history(policy, last)
        return policy.prepare(history, position.messages_after(last), request.tools, self._media)

    def _get_history(self, policy: Policy, reply: TrieNode) -> TokenHistory:
        """What a turn after `reply` continues, its tokens as the trace has them."""
        if reply.history is None:
            sampled = self.trace.nodes[reply.trace_node].sampled_span
            ids = self.trace.graph.path_tokens(reply.trace_node)
            history = TokenHistory.build(
                reply.messages_after(None), reply.tools, ids, num_sampled=sampled[1] - sampled[0]
            )
            self._trie_by_policy[id(policy)].cache_history(reply, history)
            return history
        return reply.history

    async def _run_call(self, request: ModelRequest, policy: Policy, position: TrieNode) -> ModelReply:
        start, by_agent = time.time(), self.is_agent_running
        self._start_timer()
        try:
            async with asyncio.timeout(self.call_timeout) as scope:
                prepared = self._prepare(policy, position, request)
                sampling, stop = (
                    self._resolve_sampling(request, position),
                    parse_stop_strings(request.sampling_overrides),
                )
                grant = await self._reserve_budget(policy, prepared, position, sampling)
                try:
                    if grant.output_tokens < sampling.max_tokens:
                        sampling = replace(sampling, max_tokens=grant.output_tokens)
                    sampled = await self._sample_with_retries(policy, prepared, sampling, stop)
                    self._num_calls += 1
                    call = ModelCall(
                        f"{self.trace.id}-{self._num_calls}",
                        request.model,
                        policy.name,
                        sampling_to_dict(sampling, stop),
                        _finish_reason(sampled),
                        sampled.usage,
                        start,
                        time.time(),
                    )
                    reply = self._record_reply(policy, position, prepared, sampled, call, grant)
                    if policy.trainable and policy is self.policy:
                        self._record_call(request, position, reply.node, by_agent=by_agent)
                    return reply
                finally:
                    self._budget.release(grant)
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = DeadlineExceeded(f"a model call took longer than {self.call_timeout:g} s")
            self.failures.append(late)
            raise late from error
        except RamifyError as error:
            self.failures.append(error)
            raise
        finally:
            self._stop_timer()

    def _record_call(self, request: ModelRequest, position: TrieNode, node: int, *, by_agent: bool) -> None:
        """Record what decides whether a call is trained."""
        last = position.last_reply
        opening = tuple(position.messages_after(None)) if last is None else ()
        continues = None if last is None else last.trace_node
        self.recorded_calls.append(
            RecordedCall(node, opening, continues, bool(request.tools), request.is_remote, by_agent)
        )

    def _resolve_sampling(self, request: ModelRequest, position: TrieNode) -> ClientSampling:
        seed = derive_call_seed(self.seed, position.digest, position.num_calls)
        position.num_calls += 1
        return resolve_sampling(self.sampling, request.sampling_overrides, is_training=self.is_training, seed=seed)

    async def _reserve_budget(
        self, policy: Policy, prepared: PreparedPrompt, position: TrieNode, sampling: ClientSampling
    ) -> BudgetGrant:
        def need() -> int:
            counted = self._budget.limits_input and prepared.rendered is not None
            return self._recorder.count_new_tokens(prepared, position) if counted else 0

        length = prepared.prompt_len or (position.last_reply.num_tokens if position.last_reply else 0)
        return await self._budget.reserve(
            need, max_tokens=sampling.max_tokens, prompt_len=length, max_model_len=policy.max_model_len
        )

    async def _sample_with_retries(
        self, policy: Policy, prepared: PreparedPrompt, sampling: ClientSampling, stop_strings: tuple[str, ...]
    ) -> SampledReply:
        """One sample, asked for again while the failure is one that may pass."""
        for attempt in range(self.max_retries + 1):
            try:
                sampled = await policy.sample(
                    prepared,
                    sampling,
                    session=self.trace.id,
                    timeout=self.call_timeout,
                    stop_strings=stop_strings,
                    clock=self.clock,
                )
                _check_logprobs_finite(policy, sampled)
                return sampled
            except RamifyError as error:
                if not error.retryable or attempt == self.max_retries:
                    raise
            await asyncio.sleep(RETRY_BACKOFF * 2**attempt)
        raise AssertionError  # the loop returns or raises

    def _record_reply(
        self,
        policy: Policy,
        position: TrieNode,
        prepared: PreparedPrompt,
        sampled: SampledReply,
        call: ModelCall,
        grant: BudgetGrant,
    ) -> ModelReply:
        """The call into the trace, the budget and the conversations, all before anybody sees the answer."""
        trainable = policy.trainable and policy is self.policy
        found = self._recorder.record_turn(position, prepared, sampled, call, self._media, trainable=trainable)
        self._budget.release(grant, num_turns=1, input_tokens=found.input_tokens, output_tokens=found.output_tokens)
        talk = self._trie_by_policy[id(policy)]
        self._reply_by_node[found.node] = talk.insert_reply(
            position, sampled.message, found.node, sampled.history, found.path_len
        )
        self._node_by_call[call.id] = found.node
        reply = ModelReply(
            sampled.message, _finish_reason(sampled), sampled.usage, found.node, call.id, sampled.problems
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
    """Raise ProviderError if a logprob is not finite: such a sample cannot be trained on."""
    not_finite = ~np.isfinite(sampled.logprobs)
    if not_finite.any():
        at = int(not_finite.argmax())
        raise ProviderError(
            f"{policy.name} gave logprob {sampled.logprobs[at]:g} for token {at} of its sample: not finite"
        )


def _finish_reason(sampled: SampledReply) -> ReplyFinishReason:
    if sampled.finish_reason == "length":
        return "length"
    return "tool_calls" if sampled.message.tool_calls else "stop"
