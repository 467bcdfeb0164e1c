"""Turn conversations into forests: tokens as the model would see and write them, with loss on chosen messages.

A conversation is rendered once, and its spans tell which tokens belong to which message; of a trained message the body
and the token that ends it are trained. A template that hides the reasoning of earlier turns renders a reply differently
when it is written than when it is history. Such a conversation becomes a tree: each reply is a branch of the history
that the model would have seen, and what the branches share is still computed once.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ramify.core.errors import TemplateRefused
from ramify.model.render import RenderedPrompt, Renderer
from ramify.trace import AnnotatedTrace, Annotation, Forest, MediaRef, Trace, build_forest
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


def build_annotated_trace(
    name: str, conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> AnnotatedTrace:
    """Build the trace of a conversation, with cross entropy on the messages of `roles`. Raises TemplateRefused."""
    trace = Trace(id=name, env=ENV_NAME)
    nodes: dict[tuple[int, bytes, tuple[str, ...]], int] = {}  # (parent, tokens, hashes of images): node
    annotations: dict[int, Annotation] = {}
    try:
        paths = list(_render_paths(conversation, renderer, roles))
    except TemplateRefused as error:
        location = f"{conversation.location}: " if conversation.location else ""
        raise TemplateRefused(f"{location}{error.message}") from error
    for rendered, trained in paths:
        parent, start = -1, 0
        for index, span in enumerate(rendered.spans):
            tokens = rendered.token_ids[start : span.stop]
            body = (span.content_span[0] - start, span.content_span[1] - start)
            images = [item for item in rendered.media if item.message_index == index]
            key = (parent, tokens.tobytes(), tuple(item.media.hash for item in images))
            if key not in nodes:
                refs = [
                    MediaRef(
                        item.part,
                        trace.add_media(conversation.media[item.media.hash]),
                        item.start - start,
                        item.stop - start,
                    )
                    for item in images
                ]
                nodes[key] = trace.graph.add_node(parent, span.message, tokens, content_span=body, media=refs)
            node = nodes[key]
            if index in trained:
                first = max(body[0], 1 if start == 0 else 0)  # nothing predicts the very first token
                stop = body[1] + _count_stop_tokens(rendered, span.content_span[1], span.stop, renderer.stop_ids)
                if first < stop:
                    annotations[node] = Annotation(name, node, (first, stop), rl=0.0, ce=1.0)
            parent, start = node, span.stop
    return AnnotatedTrace(trace, tuple(annotations.values()), env=ENV_NAME)


def _render_paths(
    conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> Iterator[tuple[RenderedPrompt, set[int]]]:
    """Iterate over the root-to-leaf paths of a conversation, each with the indices of the messages trained on it."""
    messages, tools = conversation.messages, conversation.tools
    trained = {index for index, message in enumerate(messages) if message.role in roles}
    full_render = renderer.render(messages, tools, add_generation_prompt=False, media=conversation.media)
    separate: set[int] = set()  # messages that are rendered differently when they are the last
    if any(messages[index].reasoning is not None and index < len(messages) - 1 for index in trained):
        for index in sorted(trained):
            prefix_render = renderer.render(
                messages[: index + 1], tools, add_generation_prompt=False, media=conversation.media
            )
            if not np.array_equal(prefix_render.token_ids, full_render.token_ids[: len(prefix_render.token_ids)]):
                separate.add(index)
                yield prefix_render, {index}
    yield full_render, trained - separate


def _count_stop_tokens(rendered: RenderedPrompt, start: int, stop: int, stop_ids: Sequence[int]) -> int:
    """Count the tokens from `start` up to the one that ends the reply; 0 if none does."""
    ids = rendered.token_ids[start:stop].tolist()
    return next((count for count, id in enumerate(ids, 1) if id in stop_ids), 0)
