"""Recording a model call: where a turn hangs in the graph.

The engine saw a prompt and sampled a reply. The prompt's longest prefix that is already a path of whole nodes is kept
as it is; what follows becomes new nodes, one per message, and the reply is the last of them. Where the prompt differs
from every known path, it forks there. Only token ids (and images at their placeholders) decide: two conversations that
read the same but were tokenized differently are different histories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.errors import CallConflict, TraceInvalid
from ramify.trace.columns import Int32Array
from ramify.trace.graph import MessageGraph
from ramify.trace.message import Media, MediaRef, Message, ModelCall, VersionRun
from ramify.trace.node_checks import as_logprobs, as_token_ids
from ramify.trace.trace import Trace


@dataclass(slots=True, frozen=True)
class PromptMedia:
    """An image in the prompt: part `part` of message `span`, standing at prompt tokens [start, stop)."""

    media: Media
    message_index: int
    part: int
    start: int
    stop: int


@dataclass(slots=True, frozen=True)
class MessageSpan:
    """A message of the prompt and its tokens: from the end of the message before it up to `stop`.

    `body` is the part that is message text rather than template scaffold, in prompt tokens like `stop`.
    """

    message: Message
    stop: int
    content_span: tuple[int, int]


@dataclass(slots=True, frozen=True)
class Turn:
    """One model call as the engine saw it.

    `prompt` is every token the engine was given, and `spans` says which message each part of it is; what follows the
    last span is the generation prompt and belongs to the reply. A renderer that kept a node's path verbatim may name
    the node in `after` as proof: `prompt` and `spans` then hold only what comes after that path, and nothing before it
    is compared.

    Example, ids as letters, one user message "hi" and the reply "yo":

        prompt = < u h i > < a      spans = [Span(user, stop=5, body=(2, 4))]      reply_ids = y o >
        nodes:   [< u h i >]  [< a y o >]       the reply's sampled span is [2, 5) of its own tokens
    """

    call: ModelCall
    prompt_ids: npt.ArrayLike
    spans: Sequence[MessageSpan]
    reply: Message
    reply_ids: npt.ArrayLike
    logprobs: npt.ArrayLike
    reply_content_span: tuple[int, int] | None = None  # within reply_ids; all of them unless said
    versions: Sequence[VersionRun] = ()
    media: Sequence[PromptMedia] = ()  # in the order of their places
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    trainable: bool = True
    prefix_node: int = -1


class TraceBuilder:
    """Attaches turns to a trace, each call id once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._node_by_call_id: dict[str, int] = {}
        self._num_indexed = 0  # nodes whose call ids are known

    def add_turn(self, turn: Turn) -> int:
        """Record the turn and return the reply's node; a call id seen before returns the node it already has.

        The work in Python is in the messages that are new, however long the prompt. A turn that is refused leaves no
        mark.
        """
        graph = self._trace.graph
        prompt, ids = as_token_ids(turn.prompt_ids), as_token_ids(turn.reply_ids)
        if not -1 <= turn.prefix_node < len(graph):
            raise TraceInvalid(
                f"prefix_node of call {turn.call.id!r}: expected a node of the trace, which has {len(graph)}, "
                f"found {turn.prefix_node}"
            )
        self._index_call_ids()
        if turn.call.id in self._node_by_call_id:
            node = self._node_by_call_id[turn.call.id]
            _check_same_call(graph, node, turn, prompt, ids)
            return node
        nodes, media = len(graph), len(graph.media)
        try:
            node = self._add_nodes(turn, prompt, ids)
        except BaseException:
            graph.truncate(nodes, media)
            raise
        self._node_by_call_id[turn.call.id] = node
        self._num_indexed = len(graph)
        return node

    def _index_call_ids(self) -> None:
        """Learn the call ids of nodes that came without this builder: decoded, added by hand or by another one."""
        for index in range(self._num_indexed, len(self._trace.graph)):
            if (call := self._trace.graph.read_record(index).call) is not None:
                self._node_by_call_id[call.id] = index
        self._num_indexed = len(self._trace.graph)

    def _add_nodes(self, turn: Turn, prompt: Int32Array, reply_ids: Int32Array) -> int:
        graph = self._trace.graph
        node, start, known = _find_parent(graph, turn, prompt)
        _check_spans(turn, known, len(prompt))
        for number in range(known, len(turn.spans)):
            span = turn.spans[number]
            body = (max(span.content_span[0], start) - start, max(span.content_span[1], start) - start)
            media = self._add_media_refs(turn.media, number, start)
            node = graph.add_node(node, span.message, prompt[start : span.stop], content_span=body, media=media)
            start = span.stop
        lead = len(prompt) - start
        body = turn.reply_content_span or (0, len(reply_ids))
        return graph.add_node(
            node,
            turn.reply,
            np.concatenate([prompt[start:], reply_ids]),
            sampled_span=(lead, lead + len(reply_ids)),
            content_span=(lead + body[0], lead + body[1]),
            logprobs=turn.logprobs,
            versions=turn.versions,
            arrays=turn.arrays,
            call=turn.call,
            trainable=turn.trainable,
        )

    def _add_media_refs(self, media: Sequence[PromptMedia], message_index: int, start: int) -> list[MediaRef]:
        """The media of one message, placed from its first new token on."""
        mine = (item for item in media if item.message_index == message_index and item.start >= start)
        return [MediaRef(m.part, self._trace.add_media(m.media), m.start - start, m.stop - start) for m in mine]


def _find_parent(graph: MessageGraph, turn: Turn, prompt: Int32Array) -> tuple[int, int, int]:
    """The node to continue, how much of the prompt its path covers, and the first message that is new after it."""
    placed = [(item.start, item.stop, item.media.hash) for item in turn.media]
    node, matched = graph.match_prefix(prompt, placed, turn.prefix_node)
    spans = turn.spans
    known = bisect_left(spans, matched, key=lambda span: span.stop)
    if known < len(spans) and _is_covered(turn, known, matched):
        known += 1
        # The node may be the message after it, where that has no body and began with the closing scaffold.
        if _is_empty_next_message(graph, node, turn, known, matched):
            known += 1
    # Messages without tokens leave no mark in the prompt: they are recognised by what they say.
    while known < len(spans) and spans[known].stop == matched:
        said = spans[known].message
        empty = (child for child in graph.children(node) if graph.token_start(child) == graph.token_stop(child))
        found = next((child for child in empty if graph.read_record(child).message == said), None)
        if found is None:
            break
        node, known = found, known + 1
    return node, matched, known


def _is_covered(turn: Turn, message_index: int, matched: int) -> bool:
    """Whether a path that ends in message i holds all of it, but perhaps for closing scaffold."""
    start = turn.spans[message_index - 1].stop if message_index else 0
    return start < matched and _find_content_stop(turn, message_index) <= matched


def _find_content_stop(turn: Turn, message_index: int) -> int:
    stop = turn.spans[message_index].content_span[1]
    return (
        max([stop, *(item.stop for item in turn.media if item.message_index == message_index)]) if turn.media else stop
    )


def _is_empty_next_message(graph: MessageGraph, node: int, turn: Turn, message_index: int, matched: int) -> bool:
    """Whether the node a path ends in is message i, without body, behind the closing scaffold of the one before."""
    if message_index == len(turn.spans) or _find_content_stop(turn, message_index) > matched:
        return False
    before = graph.depth(node) - graph.path_length(turn.prefix_node)
    return (
        _is_covered(turn, message_index - 1, before)
        and graph.read_record(node).message == turn.spans[message_index].message
    )


def _check_spans(turn: Turn, first_new: int, num_prompt_tokens: int) -> None:
    before = turn.spans[first_new - 1].stop if first_new else 0
    for i, span in enumerate(turn.spans[first_new:], first_new):
        low, high = span.content_span
        if not before <= low <= high <= span.stop <= num_prompt_tokens:
            raise TraceInvalid(
                f"message {i} of call {turn.call.id!r}: body [{low}, {high}) and stop {span.stop} must lie in order "
                f"between {before} and the prompt's {num_prompt_tokens} tokens"
            )
        before = span.stop
    before = 0
    for item in turn.media:
        if not 0 <= item.message_index < len(turn.spans):
            raise TraceInvalid(
                f"media of call {turn.call.id!r} is in message {item.message_index} of {len(turn.spans)}"
            )
        low = turn.spans[item.message_index - 1].stop if item.message_index else 0
        if not max(low, before) <= item.start < item.stop <= turn.spans[item.message_index].stop:
            raise TraceInvalid(
                f"media [{item.start}, {item.stop}) of call {turn.call.id!r} leaves message "
                f"{item.message_index} or its order"
            )
        before = item.stop


def _check_same_call(graph: MessageGraph, node: int, turn: Turn, prompt: Int32Array, reply_ids: Int32Array) -> None:
    known = graph.path_length(turn.prefix_node)
    start, stop, begin = (
        int(graph.nodes.view[node][name]) for name in ("sampled_start", "sampled_stop", "logprobs_stop")
    )
    placed = [(item.start + known, item.stop + known, item.media.hash) for item in turn.media]
    logprobs = graph.logprobs.view[begin - (stop - start) : begin]
    differs = {
        "another path": turn.prefix_node >= 0 and turn.prefix_node not in graph.path_nodes(node),
        "other tokens": not np.array_equal(graph.path_tokens(node)[known:], np.concatenate([prompt, reply_ids])),
        "another sample": stop - start != len(reply_ids),
        "other media": [image for image in graph.path_media(node) if image[0] >= known] != placed,
        "other logprobs": not np.array_equal(as_logprobs(turn.logprobs), logprobs, equal_nan=True),
    }
    found = [name for name, holds in differs.items() if holds]
    if found:
        raise CallConflict(f"call {turn.call.id!r} was recorded as node {node} with {' and '.join(found)}")
