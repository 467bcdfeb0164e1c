"""Writing a call into the trace: where it hangs, what it added, and why it left the paths that were there.

The graph alone decides where a turn hangs, by its tokens; the conversations only know what the client meant. A fork is
where the graph has one; its reason is the renderer's where that rewrote history, else what the client did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ramify.gateway.conversation_trie import TrieNode, fork_reason
from ramify.gateway.policy import PreparedPrompt, SampledReply
from ramify.trace import Media, MediaPart, ModelCall, Trace, TraceBuilder, Turn


class RecordedTurn(NamedTuple):
    """The reply's node, the tokens that are new in the trace, and those of the whole path."""

    node: int
    input_tokens: int
    output_tokens: int
    path_len: int


class TraceRecorder:
    """Grows one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._builder = TraceBuilder(trace)

    def count_new_tokens(self, prepared: PreparedPrompt, position: TrieNode) -> int:
        """How many tokens of a prompt the trace does not hold yet."""
        return (
            len(prepared.new_token_ids)
            - self.trace.graph.match_prefix(prepared.new_token_ids, (), _prefix_node(prepared, position))[1]
        )

    def record_turn(
        self,
        position: TrieNode,
        prepared: PreparedPrompt,
        sampled: SampledReply,
        call: ModelCall,
        media: Mapping[str, Media],
        *,
        trainable: bool,
    ) -> RecordedTurn:
        """Add the turn whose prompt leads to `end`. A turn that is refused leaves no mark."""
        graph = self.trace.graph
        first, tokens, logprobs = len(graph), graph.tokens.size, graph.logprobs.size
        node = self._builder.add_turn(
            Turn(
                call,
                prepared.new_token_ids,
                prepared.spans,
                sampled.message,
                sampled.token_ids,
                sampled.logprobs,
                reply_body=sampled.content_span,
                versions=sampled.versions,
                trainable=trainable,
                after=_prefix_node(prepared, position),
            )
        )
        self._store_media(prepared, media)
        self._record_fork(first, prepared, position)
        if prepared.rendered is None:
            return self._count_from_usage(node, sampled, position)
        output = graph.logprobs.size - logprobs
        return RecordedTurn(
            node, graph.tokens.size - tokens - output, output, prepared.prompt_len + len(sampled.token_ids)
        )

    def _count_from_usage(self, node: int, sampled: SampledReply, position: TrieNode) -> RecordedTurn:
        """The counts of a policy without tokens are its own, and the trace says so."""
        self.trace.info["token_counts"] = "usage"
        usage = sampled.usage
        before = position.last_reply.num_tokens if position.last_reply else 0
        new = 0 if position.num_replies else max(0, usage.prompt_tokens - before)
        return RecordedTurn(node, new, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)

    def _store_media(self, prepared: PreparedPrompt, media: Mapping[str, Media]) -> None:
        """What new messages show, into the trace's table."""
        contents = (span.message.content for span in prepared.spans)
        parts = (part for content in contents if not isinstance(content, str) for part in content)
        for part in parts:
            if isinstance(part, MediaPart) and part.hash in media:
                self.trace.add_media(media[part.hash])

    def _record_fork(self, first_node: int, prepared: PreparedPrompt, position: TrieNode) -> None:
        """Note where and why the turn, whose first new node is `first`, left the paths that were there."""
        trace, broke = self.trace, prepared.prefix_break
        if broke is not None:
            for name, value in broke.metrics.items():
                trace.metrics[name] = trace.metrics.get(name, 0.0) + value
        at = int(trace.graph.nodes.view["parent"][first_node])
        if at == first_node - 1 or trace.graph.children(at) == [first_node]:
            return
        reason, detail = (fork_reason(position), "") if broke is None else (str(broke.reason), broke.detail)
        fork = {"node": first_node, "at": at, "reason": reason, "detail": detail}
        trace.info["forks"] = [*trace.info.get("forks", []), fork]
        trace.metrics["forks"] = trace.metrics.get("forks", 0.0) + 1.0


def _prefix_node(prepared: PreparedPrompt, position: TrieNode) -> int:
    """The node whose path the prompt keeps; none where all was rendered anew."""
    return -1 if prepared.prefix_break is not None or position.last_reply is None else position.last_reply.trace_node
