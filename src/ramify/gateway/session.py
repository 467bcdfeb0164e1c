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
from ramify.gateway.asking import Asking, Askings
from ramify.gateway.budget import Budget, Grant
from ramify.gateway.canonical import fingerprint
from ramify.gateway.config import Limits, SamplingConfig
from ramify.gateway.conversations import Conversations, Said
from ramify.gateway.exchange import Finish, Reply, Request
from ramify.gateway.policy import Policy, Prepared, Sampled
from ramify.gateway.recording import Recorder
from ramify.gateway.selection import RecordedCall
from ramify.gateway.wishes import call_seed, effective, recorded, stop_strings
from ramify.render import TokenHistory
from ramify.trace import Media, ModelCall, Trace

BACKOFF = 0.25  # seconds before a failed call is made again; doubled each time
REFUSALS = 50  # different refusals that a trace keeps
REFUSAL_LENGTH = 1000  # characters of a refusal's message that are kept
LINGER = 5.0  # seconds a call goes on when its client has hung up: about as long as SDKs wait before they ask again


class Session:
    """One rollout. `models` are other models by the name a client asks for; every other name is the policy's.

    `deadline` is what one call may take in seconds, retries and waiting included.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        *,
        sampling: SamplingConfig,
        limits: Limits,
        models: Mapping[str, Policy] | None = None,
        train: bool = False,
        seed: int | None = None,
        deadline: float = 600.0,
        retries: int = 3,
        linger: float = LINGER,
    ) -> None:
        if train:
            sampling.check_trainable()
            if not policy.trainable:
                raise TokensRequired(f"{policy.name} gives no token ids and logprobs, so it cannot be trained on")
        self.trace, self.policy, self.sampling = trace, policy, sampling
        self.models = dict(models or {})
        self.train, self.deadline, self.retries = train, deadline, retries
        self.seed = sampling.seed if seed is None else seed
        self.secret = secrets.token_urlsafe(32)
        self.failures: list[RamifyError] = []
        """Calls that failed, for whoever runs an agent that does not tell."""
        self.watch: Callable[[Reply], None] | None = None
        """Called with every reply that was recorded."""
        self.agent_runs = True
        """Whether the agent runs; False before and after, when calls are made by hooks."""
        self.calls: list[RecordedCall] = []
        """The recorded calls of the trainable policy, with what decides whether they are trained."""
        self.clock = StallClock()
        """Measures how long its calls waited for an engine that made no progress."""
        self._budget = Budget(limits)
        self._recorder = Recorder(trace)
        self._talks: dict[int, Conversations] = {}  # by policy
        self._replies: dict[int, Said] = {}  # by node
        self._nodes: dict[str, int] = {}  # by call
        self._askings = Askings(linger)
        self._media: dict[str, Media] = {}
        self._calls = 0
        self._running, self._since, self._seconds = 0, 0.0, 0.0

    # -- asking --------------------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Reply:
        """The policy's reply, recorded.

        Raises BudgetExceeded or ContextOverflow when the policy has used up its room, and what went wrong by its name
        when the call could not be made.
        """
        if request.retry is None and not request.retries:
            return await self._call(request, *self._place(request))
        asking = self.begin(request)
        try:
            reply = await asking.answer()
        except BaseException:
            asking.leave(delivered=False)
            raise
        asking.leave(delivered=True)
        return reply

    def begin(self, request: Request) -> Asking:
        """The call for a client that may hang up and ask again; whoever gets it says `leave` in the end."""
        policy, end = self._place(request)
        same = (id(policy), id(end), fingerprint([request.tools, request.asked]))
        return self._askings.begin(request, same, lambda: self._call(request, policy, end))

    def count(self, request: Request) -> int:
        """The tokens of the prompt this request would make; for a policy without tokens a guess from its length."""
        policy, end = self._place(request)
        prepared = self._prepare(policy, end, request)
        if prepared.rendered is not None:
            return prepared.length
        said = sum(len(message.text) for message in prepared.messages)
        return (said + len(fingerprint(request.tools))) // 4 + 4 * len(prepared.messages)

    def node_of(self, call: str) -> int:
        """The node of an earlier reply, by its call's id."""
        if call not in self._nodes:
            raise RequestInvalid(f"no reply {call!r} is known in this session")
        return self._nodes[call]

    def record_refusal(self, path: str, status: int, name: str, message: str) -> None:
        """Record in the trace that a client was refused. Equal refusals are counted; at most `REFUSALS` are kept."""
        refusals = list(self.trace.info.get("refusals", []))
        entry = {"path": path, "status": status, "name": name, "message": message[:REFUSAL_LENGTH]}
        for at, known in enumerate(refusals):
            if {**known, "count": 0} == {**entry, "count": 0}:
                refusals[at] = {**entry, "count": known["count"] + 1}
                break
        else:
            refusals.append({**entry, "count": 1})
        self.trace.info["refusals"] = refusals[:REFUSALS]

    def close(self) -> None:
        """Give up calls that are still running for clients."""
        self._askings.close()

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """Calls that were recorded."""
        return self._budget.turns

    @property
    def exhausted(self) -> str | None:
        """The limit that leaves no further call ("max_turns", ...), if one does."""
        return self._budget.exhausted

    @property
    def input_tokens(self) -> int:
        return self._budget.input

    @property
    def output_tokens(self) -> int:
        return self._budget.output

    @property
    def model_seconds(self) -> float:
        """Seconds during which at least one call was running."""
        return self._seconds + (time.monotonic() - self._since if self._running else 0.0)

    # -- one call ------------------------------------------------------------------------------------------------------

    def _place(self, request: Request) -> tuple[Policy, Said]:
        """Who answers, and the place in its conversations that the request leads to."""
        policy = self.models.get(request.model, self.policy)
        talk = self._talks.get(id(policy))
        if talk is None:
            talk = self._talks[id(policy)] = Conversations()
        self._media.update(request.media)
        messages = policy.adapt(request.messages, self._media, opening=request.after is None)
        if request.after is None:
            if not messages:
                raise RequestInvalid("messages: at least one is needed")
            return policy, talk.reach(talk.root, messages, request.tools)
        said = self._replies.get(request.after)
        if said is None:
            raise RequestInvalid(f"after: node {request.after} is no reply of this session")
        if said.root is talk.root:
            return policy, talk.reach(said, messages, request.tools)
        return policy, talk.reach(talk.root, [*said.since(None), *messages], request.tools)

    def _prepare(self, policy: Policy, end: Said, request: Request) -> Prepared:
        last = end.last
        history = None if last is None else self._history(policy, last)
        return policy.prepare(history, end.since(last), request.tools, self._media)

    def _history(self, policy: Policy, reply: Said) -> TokenHistory:
        """What a turn after `reply` continues, its tokens as the trace has them."""
        if reply.history is None:
            sampled = self.trace.nodes[reply.node].sampled_span
            ids = self.trace.graph.path_tokens(reply.node)
            history = TokenHistory.build(reply.since(None), reply.tools, ids, num_sampled=sampled[1] - sampled[0])
            self._talks[id(policy)].keep(reply, history)
            return history
        return reply.history

    async def _call(self, request: Request, policy: Policy, end: Said) -> Reply:
        start, by_agent = time.time(), self.agent_runs
        self._enter()
        try:
            async with asyncio.timeout(self.deadline) as scope:
                prepared = self._prepare(policy, end, request)
                sampling, stop = self._wishes(request, end), stop_strings(request.asked)
                grant = await self._take(policy, prepared, end, sampling)
                try:
                    if grant.output < sampling.max_tokens:
                        sampling = replace(sampling, max_tokens=grant.output)
                    sampled = await self._sample(policy, prepared, sampling, stop)
                    self._calls += 1
                    call = ModelCall(
                        f"{self.trace.id}-{self._calls}",
                        request.model,
                        policy.name,
                        recorded(sampling, stop),
                        _finish(sampled),
                        sampled.usage,
                        start,
                        time.time(),
                    )
                    reply = self._record(policy, end, prepared, sampled, call, grant)
                    if policy.trainable and policy is self.policy:
                        self._record_call(request, end, reply.node, by_agent=by_agent)
                    return reply
                finally:
                    self._budget.settle(grant)
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = DeadlineExceeded(f"a model call took longer than {self.deadline:g} s")
            self.failures.append(late)
            raise late from error
        except RamifyError as error:
            self.failures.append(error)
            raise
        finally:
            self._exit()

    def _record_call(self, request: Request, end: Said, node: int, *, by_agent: bool) -> None:
        """Record what decides whether a call is trained."""
        last = end.last
        opening = tuple(end.since(None)) if last is None else ()
        continues = None if last is None else last.node
        self.calls.append(RecordedCall(node, opening, continues, bool(request.tools), request.remote, by_agent))

    def _wishes(self, request: Request, end: Said) -> ClientSampling:
        seed = call_seed(self.seed, end.digest, end.started)
        end.started += 1
        return effective(self.sampling, request.asked, train=self.train, seed=seed)

    async def _take(self, policy: Policy, prepared: Prepared, end: Said, sampling: ClientSampling) -> Grant:
        def need() -> int:
            counted = self._budget.counts_input and prepared.rendered is not None
            return self._recorder.new_tokens(prepared, end) if counted else 0

        length = prepared.length or (end.last.length if end.last else 0)
        return await self._budget.take(need, wanted=sampling.max_tokens, length=length, longest=policy.max_model_len)

    async def _sample(
        self, policy: Policy, prepared: Prepared, sampling: ClientSampling, stop: tuple[str, ...]
    ) -> Sampled:
        """One sample, asked for again while the failure is one that may pass."""
        for attempt in range(self.retries + 1):
            try:
                sampled = await policy.sample(
                    prepared, sampling, session=self.trace.id, deadline=self.deadline, stop=stop, clock=self.clock
                )
                _check_logprobs(policy, sampled)
                return sampled
            except RamifyError as error:
                if not error.retryable or attempt == self.retries:
                    raise
            await asyncio.sleep(BACKOFF * 2**attempt)
        raise AssertionError  # the loop returns or raises

    def _record(
        self, policy: Policy, end: Said, prepared: Prepared, sampled: Sampled, call: ModelCall, grant: Grant
    ) -> Reply:
        """The call into the trace, the budget and the conversations, all before anybody sees the answer."""
        trainable = policy.trainable and policy is self.policy
        found = self._recorder.add(end, prepared, sampled, call, self._media, trainable=trainable)
        self._budget.settle(grant, turns=1, input=found.input, output=found.output)
        talk = self._talks[id(policy)]
        self._replies[found.node] = talk.reply(end, sampled.message, found.node, sampled.history, found.length)
        self._nodes[call.id] = found.node
        reply = Reply(sampled.message, _finish(sampled), sampled.usage, found.node, call.id, sampled.problems)
        if self.watch is not None:
            self.watch(reply)
        return reply

    def _enter(self) -> None:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1

    def _exit(self) -> None:
        self._running -= 1
        if not self._running:
            self._seconds += time.monotonic() - self._since


def _check_logprobs(policy: Policy, sampled: Sampled) -> None:
    """Raise ProviderError if a logprob is not finite: such a sample cannot be trained on."""
    not_finite = ~np.isfinite(sampled.logprobs)
    if not_finite.any():
        at = int(not_finite.argmax())
        raise ProviderError(
            f"{policy.name} gave logprob {sampled.logprobs[at]:g} for token {at} of its sample: not finite"
        )


def _finish(sampled: Sampled) -> Finish:
    if sampled.finish == "length":
        return "length"
    return "tool_calls" if sampled.message.tool_calls else "stop"
