"""Turn conversations into forests: tokens as the model would see and write them, with loss on chosen messages.

A conversation is rendered once, and its spans tell which tokens belong to which message; of a trained message the body
and the token that ends it are trained. A template that hides the reasoning of earlier turns renders a reply differently
when it is written than when it is history. Such a conversation becomes a tree: each reply is a branch of the history
that the model would have seen, and what the branches share is still computed once.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.core.errors import TemplateRefused
from ramify.model.render import RenderedPrompt, Renderer
from ramify.trace import AnnotatedTrace, Annotation, Forest, MediaRef, Message, Trace, build_forest
from ramify.trace.columns import common_prefix_length
from ramify.trace.forest_builder import build_merge_keys
from ramify.train.sft.conversations import SftConversation

ENV_NAME = "sft"
MIN_SAVING = 0.05  # of the tokens, by prefixes that conversations share


def build_sft_forest(
    conversations: Sequence[tuple[str, SftConversation]], renderer: Renderer, roles: Sequence[str], seq_len: int
) -> Forest:
    """Build one forest of named conversations; tokens beyond `seq_len` are cut off and counted in `dropped`.

    Conversations share at least the first tokens of the template. If that is less than MIN_SAVING of all tokens, every
    conversation is a tree of its own, because attention over a wide tree takes longer than the shared tokens.
    """
    traces = [build_annotated_trace(name, conversation, renderer, roles) for name, conversation in conversations]
    merge = _compute_saving([item.trace for item in traces]) >= MIN_SAVING
    return build_forest(traces, seq_len=seq_len, overlong="cut", merge=merge)


def _compute_saving(traces: Sequence[Trace]) -> float:
    """Return the share of tokens that merging saves, by the first path of each trace."""
    image_numbers: dict[tuple[str, bytes], int] = {}
    paths = [_build_first_path_keys(trace, image_numbers) for trace in traces]
    paths.sort(key=lambda keys: keys.tobytes())  # paths with the longest common prefix are then neighbours
    shared = sum(common_prefix_length(*pair) for pair in itertools.pairwise(paths))
    return shared / max(1, sum(map(len, paths)))


def _build_first_path_keys(trace: Trace, image_numbers: dict[tuple[str, bytes], int]) -> npt.NDArray[np.int64]:
    """Return the merge keys up to the first node that does not continue the node before it."""
    graph = trace.graph
    fork_starts = [graph.token_start(first) for first, _ in graph.runs() if first > 0]
    keys = build_merge_keys(graph, image_numbers)[: min(fork_starts, default=None)]
    return keys.astype(np.int64, copy=False)


class SftMessage(NamedTuple):
    """A message on a path of a conversation: its tokens, the part of them that is trained, and its images.

    Spans are relative to the message's first token. An image is its part of the content, its hash and its span.
    """

    message: Message
    token_ids: npt.ArrayLike
    content_span: tuple[int, int]
    trained_span: tuple[int, int] | None
    images: tuple[tuple[int, str, int, int], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What two messages after the same path must have in common to be one node."""
        return np.asarray(self.token_ids, np.int32).tobytes(), tuple(hash for _, hash, _, _ in self.images)


def build_annotated_trace(
    name: str, conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> AnnotatedTrace:
    """Build the trace of a conversation, with cross entropy on the messages of `roles`. Raises TemplateRefused.

    A conversation that was exported from a rollout keeps its tokens if the model has the tokenizer that it had there.
    """
    trace = Trace(id=name, env=ENV_NAME)
    nodes: dict[tuple[Any, ...], int] = {}
    annotations: dict[int, Annotation] = {}
    if has_recorded_tokens(conversation, renderer):
        paths = [_read_recorded_path(conversation, roles)]
    else:
        try:
            paths = list(_render_paths(conversation, renderer, roles))
        except TemplateRefused as error:
            location = f"{conversation.location}: " if conversation.location else ""
            raise TemplateRefused(f"{location}{error.message}") from error
    for path in paths:
        node = -1
        for item in path:
            key = (node, *item.key)
            if key not in nodes:
                refs = [
                    MediaRef(part, trace.add_media(conversation.media[hash]), start, stop)
                    for part, hash, start, stop in item.images
                ]
                nodes[key] = trace.graph.add_node(
                    node, item.message, item.token_ids, content_span=item.content_span, media=refs
                )
            node = nodes[key]
            if item.trained_span is not None:
                annotations[node] = Annotation(name, node, item.trained_span, rl=0.0, ce=1.0)
    return AnnotatedTrace(trace, tuple(annotations.values()), env=ENV_NAME)


def has_recorded_tokens(conversation: SftConversation, renderer: Renderer) -> bool:
    """Return whether the conversation has the tokens of a rollout, and the model has the rollout's tokenizer."""
    return conversation.recorded is not None and conversation.recorded.tokenizer == renderer.tokenizer.digest


def _read_recorded_path(conversation: SftConversation, roles: Sequence[str]) -> list[SftMessage]:
    """Return the only path of a conversation with recorded tokens."""
    assert conversation.recorded is not None
    path: list[SftMessage] = []
    for index, (message, tokens) in enumerate(zip(conversation.messages, conversation.recorded.tokens, strict=True)):
        hashes = [] if isinstance(message.content, str) else [getattr(part, "hash", "") for part in message.content]
        images = tuple((part, hashes[part], start, stop) for part, start, stop in tokens.images)
        is_trained = tokens.sampled is not None and conversation.is_trained(index, roles)
        path.append(SftMessage(message, tokens.token_ids, (0, 0), tokens.sampled if is_trained else None, images))
    return path


def _render_paths(
    conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> Iterator[list[SftMessage]]:
    """Iterate over the root-to-leaf paths of a conversation; each trained message is trained on one of them."""
    messages, tools = conversation.messages, conversation.tools
    trained = {index for index in range(len(messages)) if conversation.is_trained(index, roles)}
    full_render = renderer.render(messages, tools, add_generation_prompt=False, media=conversation.media)
    separate: set[int] = set()  # messages that are rendered differently when they are the last
    if any(messages[index].reasoning is not None and index < len(messages) - 1 for index in trained):
        for index in sorted(trained):
            prefix_render = renderer.render(
                messages[: index + 1], tools, add_generation_prompt=False, media=conversation.media
            )
            if not np.array_equal(prefix_render.token_ids, full_render.token_ids[: len(prefix_render.token_ids)]):
                separate.add(index)
                yield list(_split_messages(prefix_render, {index}, renderer.stop_ids))
    yield list(_split_messages(full_render, trained - separate, renderer.stop_ids))


def _split_messages(rendered: RenderedPrompt, trained: set[int], stop_ids: Sequence[int]) -> Iterator[SftMessage]:
    """Yield the messages of a rendered conversation; of those in `trained`, body and stop token are trained."""
    start = 0
    for index, span in enumerate(rendered.spans):
        body = (span.content_span[0] - start, span.content_span[1] - start)
        images = tuple(
            (item.part, item.media.hash, item.start - start, item.stop - start)
            for item in rendered.media
            if item.message_index == index
        )
        trained_span: tuple[int, int] | None = None
        if index in trained:
            first = max(body[0], 1 if start == 0 else 0)  # nothing predicts the very first token
            stop = body[1] + _count_stop_tokens(rendered, span.content_span[1], span.stop, stop_ids)
            trained_span = (first, stop) if first < stop else None
        yield SftMessage(span.message, rendered.token_ids[start : span.stop], body, trained_span, images)
        start = span.stop


def _count_stop_tokens(rendered: RenderedPrompt, start: int, stop: int, stop_ids: Sequence[int]) -> int:
    """Count the tokens from `start` up to the one that ends the reply; 0 if none does."""
    ids = rendered.token_ids[start:stop].tolist()
    return next((count for count, id in enumerate(ids, 1) if id in stop_ids), 0)
