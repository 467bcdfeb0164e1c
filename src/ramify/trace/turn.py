"""Records model calls as turns of a trace.

A turn is a prompt that the engine received and the reply that it sampled. The longest prefix of the prompt that is a
path of complete nodes is reused; the rest becomes new nodes, one per message, and the reply is the last of them. Where
the prompt differs from every path, the graph forks. Only token ids (and images at their placeholders) are compared: two
conversations with equal text but different tokens are different paths.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ramify.core.errors import OperationInvalid
from ramify.trace.columns import Int32Array
from ramify.trace.graph import MessageGraph
from ramify.trace.message import Media, MediaRef, Message, ModelCall, VersionSpan
from ramify.trace.node_checks import as_logprobs, as_token_ids
from ramify.trace.trace import Trace


class PromptMedia(Struct, frozen=True):
    """An image in the prompt: part `part` of message `message_index`, with the prompt tokens [start, stop)."""

    media: Media
    message_index: int
    part: int
    start: int
    stop: int


class MessageSpan(Struct, frozen=True):
    """A message of the prompt and its tokens: from the end of the previous message up to `stop`.

    `content_span` is the range of the message's own text, without the chat template. Both are indices into the prompt.
    """

    message: Message
    stop: int
    content_span: tuple[int, int]


class Turn(Struct, frozen=True):
    """One model call as the engine received it.

    `prompt_ids` are all tokens of the prompt, and `spans` the messages in it; the tokens after the last span are the
    generation prompt and belong to the reply. If the renderer has reused the tokens of a node's path, `prefix_node` may
    name that node: `prompt_ids`, `spans` and `media` then hold only what follows the path, which is not compared again.
    `reply_content_span` is relative to `reply_ids`; None means all of them. `media` is in order of start.

    Example with letters as ids, one user message "hi" and the reply "yo":

        prompt_ids = < u h i > < a      spans = [MessageSpan(user, stop=5, content_span=(2, 4))]      reply_ids = y o >
        nodes:   [< u h i >]  [< a y o >]       the reply's sampled span is [2, 5) of its own tokens
    """

    call: ModelCall
    prompt_ids: npt.ArrayLike
    spans: Sequence[MessageSpan]
    reply: Message
    reply_ids: npt.ArrayLike
    logprobs: npt.ArrayLike
    reply_content_span: tuple[int, int] | None = None
    versions: Sequence[VersionSpan] = ()
    media: Sequence[PromptMedia] = ()
    arrays: Mapping[str, npt.NDArray[Any]] = {}
    trainable: bool = True
    prefix_node: int = -1


class TraceBuilder:
    """Adds turns to a trace, each call id once. Nothing else may add model calls to it meanwhile."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        calls = ((node.index, node.call) for node in trace.nodes)
        self._node_by_call_id = {call.id: node for node, call in calls if call is not None}

    def add_turn(self, turn: Turn) -> int:
        """Record the turn and return the node of its reply; a repeated call id returns the existing node.

        The work in Python is proportional to the number of new messages. If the turn is invalid, the trace is
        unchanged. Raises OperationInvalid, also if a repeated call differs from the recorded one.
        """
        graph = self._trace.graph
        prompt_ids, reply_ids = as_token_ids(turn.prompt_ids), as_token_ids(turn.reply_ids)
        if not -1 <= turn.prefix_node < len(graph):
            raise OperationInvalid(
                f"prefix_node of call {turn.call.id!r}: expected a node of the trace, which has {len(graph)}, "
                f"found {turn.prefix_node}"
            )
        if turn.call.id in self._node_by_call_id:
            node = self._node_by_call_id[turn.call.id]
            _check_same_call(graph, node, turn, prompt_ids, reply_ids)
            return node
        num_nodes, num_media = len(graph), len(graph.media)
        try:
            node = self._add_nodes(turn, prompt_ids, reply_ids)
        except BaseException:
            graph.truncate(num_nodes, num_media)
            raise
        self._node_by_call_id[turn.call.id] = node
        return node

    def _add_nodes(self, turn: Turn, prompt_ids: Int32Array, reply_ids: Int32Array) -> int:
        graph = self._trace.graph
        node, start, first_new = _find_parent(graph, turn, prompt_ids)
        _check_spans(turn, first_new, len(prompt_ids))
        for index, span in enumerate(turn.spans[first_new:], first_new):
            content_start, content_stop = (max(position, start) - start for position in span.content_span)
            node = graph.add_node(
                node,
                span.message,
                prompt_ids[start : span.stop],
                content_span=(content_start, content_stop),
                media=self._add_media_refs(turn.media, index, start),
            )
            start = span.stop
        offset = len(prompt_ids) - start  # of the sampled tokens, after the generation prompt
        content_start, content_stop = turn.reply_content_span or (0, len(reply_ids))
        return graph.add_node(
            node,
            turn.reply,
            np.concatenate([prompt_ids[start:], reply_ids]),
            sampled_span=(offset, offset + len(reply_ids)),
            content_span=(offset + content_start, offset + content_stop),
            logprobs=turn.logprobs,
            versions=turn.versions,
            arrays=turn.arrays,
            call=turn.call,
            trainable=turn.trainable,
        )

    def _add_media_refs(self, media: Sequence[PromptMedia], message_index: int, start: int) -> list[MediaRef]:
        """Add the media of one message to the trace, and return their references relative to token `start`."""
        items = (item for item in media if item.message_index == message_index and item.start >= start)
        return [MediaRef(m.part, self._trace.add_media(m.media), m.start - start, m.stop - start) for m in items]


def _find_parent(graph: MessageGraph, turn: Turn, prompt_ids: Int32Array) -> tuple[int, int, int]:
    """Return the node to continue, the length of the prompt that its path covers, and the first new message."""
    media_spans = [(item.start, item.stop, item.media.hash) for item in turn.media]
    node, matched = graph.match_prefix(prompt_ids, media_spans, turn.prefix_node)
    spans = turn.spans
    first_new = bisect_left(spans, matched, key=lambda span: span.stop)
    if first_new < len(spans) and _is_covered(turn, first_new, matched):
        first_new += 1
        # The node may be the next message, if that has no content and starts with the closing template tokens.
        if _is_empty_next_message(graph, node, turn, first_new, matched):
            first_new += 1
    # Messages without tokens are not visible in the prompt: compare the messages themselves.
    while first_new < len(spans) and spans[first_new].stop == matched:
        message = spans[first_new].message
        empty = (child for child in graph.children(node) if graph.token_start(child) == graph.token_stop(child))
        child = next((child for child in empty if graph.read_record(child).message == message), None)
        if child is None:
            break
        node, first_new = child, first_new + 1
    return node, matched, first_new


def _is_covered(turn: Turn, message_index: int, matched: int) -> bool:
    """Whether `matched` tokens of the prompt include the whole message, except perhaps closing template tokens."""
    start = turn.spans[message_index - 1].stop if message_index else 0
    return start < matched and _find_content_stop(turn, message_index) <= matched


def _find_content_stop(turn: Turn, message_index: int) -> int:
    """Return where the content of a message ends, including its media."""
    media_stops = (item.stop for item in turn.media if item.message_index == message_index)
    return max([turn.spans[message_index].content_span[1], *media_stops])


def _is_empty_next_message(graph: MessageGraph, node: int, turn: Turn, message_index: int, matched: int) -> bool:
    """Whether `node` is this message without content, after the closing template tokens of the previous one."""
    if message_index == len(turn.spans) or _find_content_stop(turn, message_index) > matched:
        return False
    if not _is_covered(turn, message_index - 1, graph.depth(node) - graph.path_length(turn.prefix_node)):
        return False
    return graph.read_record(node).message == turn.spans[message_index].message


def _check_spans(turn: Turn, first_new: int, num_prompt_tokens: int) -> None:
    """Raise OperationInvalid if the spans of the new messages or the media are out of order or range."""
    call_id, spans = turn.call.id, turn.spans
    previous_stop = spans[first_new - 1].stop if first_new else 0
    for index, span in enumerate(spans[first_new:], first_new):
        start, stop = span.content_span
        if not previous_stop <= start <= stop <= span.stop <= num_prompt_tokens:
            raise OperationInvalid(
                f"message {index} of call {call_id!r}: content_span [{start}, {stop}) and stop {span.stop} must be in "
                f"order between {previous_stop} and the prompt's {num_prompt_tokens} tokens"
            )
        previous_stop = span.stop
    previous_stop = 0
    for item in turn.media:
        index = item.message_index
        if not 0 <= index < len(spans):
            raise OperationInvalid(f"media of call {call_id!r} refers to message {index} of {len(spans)}")
        start = max(spans[index - 1].stop if index else 0, previous_stop)
        if not start <= item.start < item.stop <= spans[index].stop:
            raise OperationInvalid(
                f"media [{item.start}, {item.stop}) of call {call_id!r} is out of order or outside message {index}"
            )
        previous_stop = item.stop


def _check_same_call(graph: MessageGraph, node: int, turn: Turn, prompt_ids: Int32Array, reply_ids: Int32Array) -> None:
    """Raise OperationInvalid if the turn differs from the one that `node` records."""
    prefix_length = graph.path_length(turn.prefix_node)
    sampled_start, sampled_stop, logprobs_stop = (
        int(graph.nodes.view[node][name]) for name in ("sampled_start", "sampled_stop", "logprobs_stop")
    )
    num_sampled = sampled_stop - sampled_start
    media_spans = [(item.start + prefix_length, item.stop + prefix_length, item.media.hash) for item in turn.media]
    logprobs = graph.logprobs.view[logprobs_stop - num_sampled : logprobs_stop]
    token_ids = np.concatenate([prompt_ids, reply_ids])
    checks = {
        "another path": turn.prefix_node >= 0 and turn.prefix_node not in graph.path_nodes(node),
        "other tokens": not np.array_equal(graph.path_tokens(node)[prefix_length:], token_ids),
        "another sample": num_sampled != len(reply_ids),
        "other media": [span for span in graph.path_media(node) if span[0] >= prefix_length] != media_spans,
        "other logprobs": not np.array_equal(as_logprobs(turn.logprobs), logprobs, equal_nan=True),
    }
    if differences := [name for name, differs in checks.items() if differs]:
        raise OperationInvalid(f"call {turn.call.id!r} was recorded as node {node} with {' and '.join(differences)}")
