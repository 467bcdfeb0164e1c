"""Writing a call into the trace: where it hangs, what it added, and why it left the paths that were there.

The graph alone decides where a turn hangs, by its tokens; the conversations only know what the client meant. A fork is
where the graph has one; its reason is the renderer's where that rewrote history, else what the client did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ramify.gateway.conversations import Said, parting
from ramify.gateway.policy import Prepared, Sampled
from ramify.trace import Media, MediaPart, ModelCall, Trace, TraceBuilder, Turn


class Recorded(NamedTuple):
    """The reply's node, the tokens that are new in the trace, and those of the whole path."""

    node: int
    input: int
    output: int
    length: int


class Recorder:
    """Grows one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._builder = TraceBuilder(trace)

    def new_tokens(self, prepared: Prepared, end: Said) -> int:
        """How many tokens of a prompt the trace does not hold yet."""
        return len(prepared.added) - self.trace.graph.match_prefix(prepared.added, (), _after(prepared, end))[1]

    def add(
        self,
        end: Said,
        prepared: Prepared,
        sampled: Sampled,
        call: ModelCall,
        media: Mapping[str, Media],
        *,
        trainable: bool,
    ) -> Recorded:
        """Add the turn whose prompt leads to `end`. A turn that is refused leaves no mark."""
        graph = self.trace.graph
        first, tokens, logprobs = len(graph), graph.tokens.size, graph.logprobs.size
        node = self._builder.add_turn(
            Turn(
                call,
                prepared.added,
                prepared.spans,
                sampled.message,
                sampled.ids,
                sampled.logprobs,
                reply_body=sampled.body,
                versions=sampled.versions,
                trainable=trainable,
                after=_after(prepared, end),
            )
        )
        self._keep_media(prepared, media)
        self._count_fork(first, prepared, end)
        if prepared.rendered is None:
            return self._by_usage(node, sampled, end)
        output = graph.logprobs.size - logprobs
        return Recorded(node, graph.tokens.size - tokens - output, output, prepared.length + len(sampled.ids))

    def _by_usage(self, node: int, sampled: Sampled, end: Said) -> Recorded:
        """The counts of a policy without tokens are its own, and the trace says so."""
        self.trace.info["token_counts"] = "usage"
        usage = sampled.usage
        before = end.last.length if end.last else 0
        new = 0 if end.replies else max(0, usage.prompt_tokens - before)
        return Recorded(node, new, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)

    def _keep_media(self, prepared: Prepared, media: Mapping[str, Media]) -> None:
        """What new messages show, into the trace's table."""
        contents = (span.message.content for span in prepared.spans)
        parts = (part for content in contents if not isinstance(content, str) for part in content)
        for part in parts:
            if isinstance(part, MediaPart) and part.hash in media:
                self.trace.add_media(media[part.hash])

    def _count_fork(self, first: int, prepared: Prepared, end: Said) -> None:
        """Note where and why the turn, whose first new node is `first`, left the paths that were there."""
        trace, broke = self.trace, prepared.broke
        if broke is not None:
            for name, value in broke.metrics.items():
                trace.metrics[name] = trace.metrics.get(name, 0.0) + value
        at = int(trace.graph.nodes.view["parent"][first])
        if at == first - 1 or trace.graph.children(at) == [first]:
            return
        reason, detail = (parting(end), "") if broke is None else (str(broke.reason), broke.detail)
        fork = {"node": first, "at": at, "reason": reason, "detail": detail}
        trace.info["forks"] = [*trace.info.get("forks", []), fork]
        trace.metrics["forks"] = trace.metrics.get("forks", 0.0) + 1.0


def _after(prepared: Prepared, end: Said) -> int:
    """The node whose path the prompt keeps; none where all was rendered anew."""
    return -1 if prepared.broke is not None or end.last is None else end.last.node
