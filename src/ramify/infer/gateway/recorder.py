"""Record model calls in a trace: the nodes of a turn, its token counts, and the reason if it forks.

The graph places a turn by its tokens; the conversation trie only knows the messages of the client. A fork is recorded
where the graph forks. Its reason is the renderer's if the renderer rewrote the history, else what the client changed.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from ramify.infer.gateway.conversation_trie import TrieNode, fork_reason
from ramify.infer.gateway.policy import PreparedPrompt, SampledReply
from ramify.model.render import ToolSchema
from ramify.trace import Media, MediaPart, ModelCall, Trace, TraceBuilder, Turn

TOOLS_KEY = "offered_tools"  # of a trace's info: by the root of their paths the tools that were offered, as JSON
STRUCTURED_OUTPUT_REASON = "structured output: sampled only from the tokens that a grammar allows"


class RecordedTurn(NamedTuple):
    """The reply's node, the numbers of tokens that are new in the trace, and the length of the whole path."""

    node: int
    input_tokens: int
    output_tokens: int
    path_len: int


class TraceRecorder:
    """Records the calls of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._builder = TraceBuilder(trace)

    def count_new_tokens(self, prepared: PreparedPrompt, position: TrieNode) -> int:
        """Return how many tokens of a prompt the trace does not have yet."""
        return (
            len(prepared.new_token_ids)
            - self.trace.graph.match_prefix(
                prepared.new_token_ids,
                [(item.start, item.stop, item.media.hash) for item in prepared.prompt_media],
                _prefix_node(prepared, position),
            )[1]
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
        reason: str = "",
    ) -> RecordedTurn:
        """Add the turn whose prompt ends at `position`. A turn that is rejected leaves the trace unchanged.

        `reason` is why the client forks here; by default it is inferred from what the client changed.
        """
        graph, tokens = self.trace.graph, sampled.tokens
        first_node, tokens_before, logprobs_before = len(graph), graph.tokens.size, graph.logprobs.size
        node = self._builder.add_turn(
            Turn(
                call,
                prepared.new_token_ids,
                prepared.spans,
                sampled.message,
                tokens.token_ids,
                tokens.logprobs,
                reply_content_span=sampled.content_span,
                versions=tokens.version_spans,
                media=prepared.prompt_media,
                trainable=trainable,
                prefix_node=_prefix_node(prepared, position),
            )
        )
        self._store_media(prepared, media)
        self._store_tools(first_node, prepared)
        self._record_fork(first_node, prepared, position, reason)
        if prepared.rendered is None:
            return self._count_from_usage(node, sampled, position)
        output_tokens = graph.logprobs.size - logprobs_before
        return RecordedTurn(
            node,
            graph.tokens.size - tokens_before - output_tokens,
            output_tokens,
            prepared.prompt_len + len(tokens.token_ids),
        )

    def record_structured_output(self, node: int) -> None:
        """Exclude a call from training whose tokens were sampled only from those that a grammar allows.

        The trainer computes logprobs over the whole vocabulary, so a ratio of both would be wrong.
        """
        self.trace.exclude_from_training(node, STRUCTURED_OUTPUT_REASON)
        metrics = self.trace.metrics
        metrics["untrained/structured_output"] = metrics.get("untrained/structured_output", 0.0) + 1.0

    def _count_from_usage(self, node: int, sampled: SampledReply, position: TrieNode) -> RecordedTurn:
        """Count the tokens of a policy without tokens from its usage, and note that in the trace."""
        self.trace.info["token_counts"] = "usage"
        usage = sampled.usage
        previous_len = position.last_reply.num_tokens if position.last_reply else 0
        new_tokens = 0 if position.num_replies else max(0, usage.prompt_tokens - previous_len)
        return RecordedTurn(node, new_tokens, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)

    def _store_media(self, prepared: PreparedPrompt, media: Mapping[str, Media]) -> None:
        """Add the media of new messages to the trace."""
        contents = (span.message.content for span in prepared.spans)
        parts = (part for content in contents if not isinstance(content, str) for part in content)
        for part in parts:
            if isinstance(part, MediaPart) and part.hash in media:
                self.trace.add_media(media[part.hash])

    def _store_tools(self, first_node: int, prepared: PreparedPrompt) -> None:
        """Add the tools to the trace if the turn, whose first new node is `first_node`, begins a new tree."""
        if prepared.tools and int(self.trace.graph.nodes.view["parent"][first_node]) < 0:
            tools = {str(first_node): json.dumps(prepared.tools)}  # they may hold what a header may not
            self.trace.info[TOOLS_KEY] = {**self.trace.info.get(TOOLS_KEY, {}), **tools}

    def _record_fork(self, first_node: int, prepared: PreparedPrompt, position: TrieNode, reason: str) -> None:
        """Record where and why the turn, whose first new node is `first_node`, forks from the existing paths."""
        trace, prefix_break = self.trace, prepared.prefix_break
        if prefix_break is not None:
            for name, value in prefix_break.metrics.items():
                trace.metrics[name] = trace.metrics.get(name, 0.0) + value
        parent = int(trace.graph.nodes.view["parent"][first_node])
        if parent == first_node - 1 or trace.graph.children(parent) == [first_node]:
            return
        if prefix_break is None:
            fork = {"node": first_node, "at": parent, "reason": reason or fork_reason(position), "detail": ""}
        else:
            fork = {"node": first_node, "at": parent, "reason": str(prefix_break.reason), "detail": prefix_break.detail}
        trace.info["forks"] = [*trace.info.get("forks", []), fork]
        trace.metrics["forks"] = trace.metrics.get("forks", 0.0) + 1.0


def find_offered_tools(trace: Trace, node: int) -> list[ToolSchema]:
    """Return the tools that were offered on the path to a node."""
    return json.loads(trace.info.get(TOOLS_KEY, {}).get(str(trace.graph.path_nodes(node)[0]), "[]"))


def _prefix_node(prepared: PreparedPrompt, position: TrieNode) -> int:
    """Return the node whose path the prompt reuses; -1 if the whole prompt was rendered again."""
    return -1 if prepared.prefix_break is not None or position.last_reply is None else position.last_reply.trace_node
