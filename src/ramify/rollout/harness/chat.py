"""The chat loop: call the model, run its tool calls, let the user answer, until the conversation ends.

    initial messages -> generate -> stop hook? -> tool calls -> stop hook? -> user? -> done
                           ^_________________________________________|__________|

It runs inside the worker process: no subprocess, no network hop. A request contains only the new messages and their
parent node, so a turn of a long conversation costs no more than one of a short conversation. With `compact_at`, a
conversation that becomes too long goes on from a summary (see `Compactor`).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ramify.core.errors import ConfigInvalid, ContextOverflow, ImageInvalid, MalformedCall
from ramify.env import Hook, RolloutContext, Task, TasksetHooks, ToolSet, User
from ramify.env.user import ask_user
from ramify.infer.dialects.model_call import SUMMARY_REQUEST, ModelReply, ModelRequest
from ramify.infer.gateway.config import RolloutLimits
from ramify.model.render import ParseProblemKind
from ramify.rollout.harness.base import Harness, build_initial_messages
from ramify.rollout.harness.config import ChatHarnessConfig
from ramify.trace import Media, MediaPart, Message

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


FORK_REASON = "compacted"
METRIC = "compactions"
CONTINUE_REQUEST = Message("user", "Continue from your summary.")
EMPTY_SUMMARY = "(no summary)"
OMITTED_RESULT = "(left out: the result is too long for the context)"
SUMMARY_SHARE = 8  # a summary is expected to have one part in this many of a path's tokens


class Compactor:
    """Compacts the conversation of one rollout: when it becomes long, the policy summarizes it and goes on from there.

        system ── task ── reply ── tool ── reply ── tool ── request ── SUMMARY
                    └──── summary ── "Continue" ── reply ── tool ...

    The summary is one more reply at the end of the old branch, sampled and trained like any other. The next branch
    starts after `initial_messages`, the system prompt and the task, which both branches share.
    """

    def __init__(self, session: "RolloutSession", compact_at: int | None, initial_messages: Sequence[Message]) -> None:
        self._session, self._compact_at = session, compact_at
        self._initial_messages = tuple(initial_messages)

    async def is_due(self, request: ModelRequest) -> bool:
        """Return whether the conversation must be compacted before this request.

        The first turn of a branch is never preceded by a compaction, so every branch makes progress. Neither is the
        last turn that `max_turns` or the token limits allow, because nothing would follow the summary.
        """
        if self._compact_at is None or request.parent_node is None or self._session.budget.remaining_turns == 1:
            return False
        remaining_tokens = self._session.budget.remaining_tokens
        if remaining_tokens is not None and remaining_tokens < self._compact_at // SUMMARY_SHARE:
            return False
        try:
            return await self._session.count_prompt_tokens(request) >= self._compact_at
        except ImageInvalid:  # the request itself reports it
            return False
        except ContextOverflow:  # it is too long even to be counted
            return True

    async def compact(self, request: ModelRequest) -> ModelRequest:
        """Let the policy summarize the conversation before `request`; return the first request of the next branch.

        The summary covers the tool results of the request. A message of the user is not summarized but follows the
        summary. If tool results leave no room for a summary, a note replaces each of them.
        """
        results = [message for message in request.messages if message.role != "user"]
        questions = [message for message in request.messages if message.role == "user"]
        summary_request = await self._ask_for_summary(request, results)
        if results and not await self._has_room(summary_request):
            notes = [replace(result, content=OMITTED_RESULT) for result in results]
            summary_request = await self._ask_for_summary(request, notes)
        reply = await self._session.generate(summary_request)
        metrics = self._session.trace.metrics
        metrics[METRIC] = metrics.get(METRIC, 0.0) + 1.0
        summary = Message("assistant", reply.message.text.strip() or EMPTY_SUMMARY)
        messages = (*self._initial_messages, summary, *(questions or [CONTINUE_REQUEST]))
        return ModelRequest(messages, request.tools, fork_reason=FORK_REASON)

    async def _ask_for_summary(self, request: ModelRequest, results: Sequence[Message]) -> ModelRequest:
        """Return the request for a summary after these tool results.

        It is a message of the user. Some chat templates drop earlier reasoning at such a message, so that the whole
        conversation would be rendered again, or refuse it after tool results; then it is a part of the last result.
        """
        summary_request = replace(request, messages=(*results, SUMMARY_REQUEST))
        if not results or await self._session.keeps_history(summary_request):
            return summary_request
        last = replace(results[-1], content=f"{results[-1].text}\n\n{SUMMARY_REQUEST.text}")
        return replace(request, messages=(*results[:-1], last))

    async def _has_room(self, request: ModelRequest) -> bool:
        limit = self._session.max_path_tokens
        try:
            return limit is None or await self._session.count_prompt_tokens(request) <= limit - limit // SUMMARY_SHARE
        except ContextOverflow:
            return False


EXCERPT_CHARS = 200  # of a malformed tool call


class ChatHarness(Harness):
    """Runs a conversation with tools, and with a simulated user if the taskset has one."""

    config: ChatHarnessConfig

    def check_task(self, task: Task, hooks: TasksetHooks) -> None:
        """Raise ConfigInvalid if neither a prompt nor a user can start the conversation."""
        if task.prompt is None and hooks.user is None:
            raise ConfigInvalid(
                f"task {task.identity} has no prompt, and its taskset has no `user` hook to speak first: "
                "the chat harness needs one of them"
            )

    def check_limits(self, limits: RolloutLimits) -> None:
        """Raise ConfigInvalid if no conversation could become long enough to be compacted."""
        compact_at, seq_len = self.config.compact_at, limits.seq_len
        if compact_at is not None and seq_len is not None and compact_at >= seq_len:
            raise ConfigInvalid(
                f"harness.compact_at: {compact_at} tokens are never reached, because a path has at most {seq_len} "
                "(seq_len, or the length of the served model); expected less, so that the reply, the tool results and "
                "the summary that follow still fit"
            )

    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Call the model, its tools and the user in turn until one of them ends the rollout."""
        messages, media = self.build_messages(context.task)
        return await ChatLoop(context, session, tools, user, stop_hooks, self.config).run(messages, media)

    def build_messages(self, task: Task) -> tuple[list[Message], dict[str, Media]]:
        """Return the messages that start the conversation, and their images by hash."""
        return build_initial_messages(task)


class ChatLoop:
    """One conversation of a rollout.

    - `last_reply`: the last reply of the model; None before the first.
    - `num_turns`: the number of replies.
    """

    def __init__(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
        config: ChatHarnessConfig,
    ) -> None:
        self._context, self._session, self._config = context, session, config
        self._tools, self._user, self._stop_hooks = tools, user, stop_hooks
        self._num_malformed = self._num_replies_to_user = 0
        self.last_reply: ModelReply | None = None
        self.num_turns = 0

    async def run(self, messages: list[Message], media: Mapping[str, Media], *, fork_reason: str = "") -> str:
        """Start the conversation with these messages, and return the reason why it ended.

        `fork_reason` says why it leaves the conversations that the trace has already.
        """
        if self._context.task.prompt is None and all(message.role == "system" for message in messages):
            first_message = await self._next_user_message(None)
            if first_message is None:
                return "user"
            messages = [*messages, first_message]
        compactor = Compactor(self._session, self._config.compact_at, messages)
        all_media = {**media, **self._collect_media(messages)}
        request = ModelRequest(tuple(messages), self._tools.schemas, media=all_media, fork_reason=fork_reason)
        while True:
            if self._session.exhausted_limit is not None:
                return self._session.exhausted_limit
            if await compactor.is_due(request):
                request = await compactor.compact(request)
                continue
            reply = self.last_reply = await self._session.generate(request)
            self.num_turns += 1
            outcome = await self._find_stop_reason() or await self._respond_to(reply)
            if isinstance(outcome, str):
                return outcome
            new_media = self._collect_media(outcome)
            request = ModelRequest(tuple(outcome), self._tools.schemas, parent_node=reply.node, media=new_media)

    async def _find_stop_reason(self) -> str | None:
        """Return the name of the stop hook that ends the rollout now, or None."""
        for hook in self._stop_hooks:
            if await hook(self._context):
                return hook.name
        return None

    async def _respond_to(self, reply: ModelReply) -> list[Message] | str:
        """Return the messages that answer a reply, or the stop reason if the rollout is over."""
        answers: list[Message] = []
        if len(self._tools):
            for call in reply.message.tool_calls:
                answers.append(await self._tools.call(call, self._context))
            answers += self._malformed_call_messages(reply)
        if answers:
            return await self._find_stop_reason() or answers
        if self._user is not None:
            message = await self._next_user_message(reply.message.text)
            return "user" if message is None else [message]
        return "length" if reply.finish_reason == "length" else "done"

    def _malformed_call_messages(self, reply: ModelReply) -> list[Message]:
        """Return the error message for malformed tool calls. A reply that was truncated is not blamed for them."""
        problems = [problem for problem in reply.problems if problem.kind is not ParseProblemKind.UNCLOSED_REASONING]
        if not problems or reply.finish_reason == "length":
            self._num_malformed = 0
            return []
        self._num_malformed += 1
        lines = [f"{problem.kind}: {problem.detail or problem.text[:EXCERPT_CHARS]}" for problem in problems]
        if self._num_malformed == self._config.max_malformed_replies:
            raise MalformedCall(f"{self._num_malformed} replies in a row had malformed tool calls; {lines[-1]}")
        return [Message("user", "\n".join(["error: a tool call could not be read; write it again.", *lines]))]

    async def _next_user_message(self, reply: str | None) -> Message | None:
        if reply is not None:
            self._num_replies_to_user += 1
        return await ask_user(self._user, self._context, reply=reply, turn=self._num_replies_to_user)

    def _collect_media(self, messages: Sequence[Message]) -> dict[str, Media]:
        """Return the images of tool results, which the trace stores."""
        parts = (part for message in messages if not isinstance(message.content, str) for part in message.content)
        hashes = {part.hash for part in parts if isinstance(part, MediaPart)}
        if not hashes:
            return {}
        return {media.hash: media for media in self._context.trace.graph.media if media.hash in hashes}
