"""Compaction: when a conversation becomes long, the policy summarizes it and goes on from the summary.

    system ── task ── reply ── tool ── reply ── tool ── request ── SUMMARY
                └──── summary ── "Continue" ── reply ── tool ...

The summary is one more reply at the end of the old branch, sampled and trained like any other. The next branch starts
after the task, with the summary as a message of the assistant, so the two branches share the system prompt and the
task. A path stays short, while the trace, which is the union of the paths, grows without a bound on its length.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ramify.core.errors import ContextOverflow, ImageInvalid
from ramify.infer.dialects.model_call import SUMMARY_REQUEST, ModelRequest
from ramify.trace import Message

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession

FORK_REASON = "compacted"
METRIC = "compactions"
CONTINUE_REQUEST = Message("user", "Continue from your summary.")
EMPTY_SUMMARY = "(no summary)"
OMITTED_RESULT = "(left out: the result is too long for the context)"
SUMMARY_SHARE = 8  # a summary is expected to have one part in this many of a path's tokens


class Compactor:
    """Compacts the conversation of one rollout. `initial_messages` are kept: the system prompt and the task."""

    def __init__(self, session: "RolloutSession", compact_at: int | None, initial_messages: Sequence[Message]) -> None:
        self._session, self._compact_at = session, compact_at
        self._initial_messages = tuple(initial_messages)

    async def is_due(self, request: ModelRequest) -> bool:
        """Return whether the conversation must be compacted before this request.

        The first turn of a branch is never preceded by a compaction, so every branch makes progress. Neither is the
        last turn that `max_turns` or the token limits allow, because nothing would follow the summary.
        """
        if self._compact_at is None or request.parent_node is None or self._session.remaining_turns == 1:
            return False
        remaining_tokens = self._session.remaining_tokens
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
            notes = [_replace_content(result, OMITTED_RESULT) for result in results]
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
        last = _replace_content(results[-1], f"{results[-1].text}\n\n{SUMMARY_REQUEST.text}")
        return replace(request, messages=(*results[:-1], last))

    async def _has_room(self, request: ModelRequest) -> bool:
        limit = self._session.max_path_tokens
        try:
            return limit is None or await self._session.count_prompt_tokens(request) <= limit - limit // SUMMARY_SHARE
        except ContextOverflow:
            return False


def _replace_content(result: Message, content: str) -> Message:
    return Message(result.role, content, tool_call_id=result.tool_call_id)
