"""From conversations to what is trained: tokens as the model would see and write them, loss on chosen messages.

A conversation is rendered once and its spans say whose tokens are whose; of a learned message the body and the token
that ends it count. A template that hides the thinking of earlier turns writes a reply differently when it is made than
when it is history. Such a conversation becomes a tree: each reply hangs, as it was made, off the history that the model
would have seen, and what the branches share is still computed once.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ramify.errors import TemplateRefused
from ramify.render import RenderedPrompt, Renderer
from ramify.trace import AnnotatedTrace, Annotation, Forest, Trace
from ramify.trace import build_forest as build_trace_forest
from ramify.train.sft.conversations import SftConversation

ENV_NAME = "sft"


def build_forest(
    conversations: Sequence[tuple[str, SftConversation]], renderer: Renderer, roles: Sequence[str], seq_len: int
) -> Forest:
    """Named conversations as one forest; ends beyond `seq_len` are cut off and counted in `dropped`."""
    return build_trace_forest(
        [build_annotated_trace(name, chat, renderer, roles) for name, chat in conversations],
        seq_len=seq_len,
        overlong="cut",
    )


def build_annotated_trace(
    name: str, conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> AnnotatedTrace:
    """One conversation as a trace, with cross entropy on the messages of `roles`. Raises TemplateRefused."""
    trace = Trace(id=name, env=ENV_NAME)
    known: dict[tuple[int, bytes], int] = {}
    notes: dict[int, Annotation] = {}
    try:
        paths = list(_render_paths(conversation, renderer, roles))
    except TemplateRefused as error:
        raise TemplateRefused(
            f"{conversation.location}: {error.message}" if conversation.location else error.message
        ) from error
    for rendered, learned in paths:
        parent, start = -1, 0
        for number, span in enumerate(rendered.spans):
            tokens = rendered.token_ids[start : span.stop]
            key = (parent, tokens.tobytes())
            if key not in known:
                body = (span.content_span[0] - start, span.content_span[1] - start)
                known[key] = trace.add_node(parent, span.message, tokens, content_span=body)
            node = known[key]
            if number in learned:
                content_start, content_stop = span.content_span
                stop = content_stop + _count_stop_tokens(rendered, content_stop, span.stop, renderer.stop_ids)
                first = max(content_start - start, 1 if start == 0 else 0)  # nothing predicts the very first token
                if first < stop - start:
                    notes[node] = Annotation(name, node, (first, stop - start), rl=0.0, ce=1.0)
            parent, start = node, span.stop
    return AnnotatedTrace(trace, tuple(notes.values()), env=ENV_NAME)


def _render_paths(
    conversation: SftConversation, renderer: Renderer, roles: Sequence[str]
) -> Iterator[tuple[RenderedPrompt, set[int]]]:
    """The ways from the root that the conversation needs, and which messages are learned on each."""
    messages = conversation.messages
    wanted = {number for number, message in enumerate(messages) if message.role in roles}
    thought = [number for number in wanted if messages[number].reasoning is not None and number < len(messages) - 1]
    whole = renderer.render(messages, conversation.tools, add_generation_prompt=False)
    apart: set[int] = set()
    if thought:  # what comes before may look different while it is the last turn
        for number in sorted(wanted):
            alone = renderer.render(messages[: number + 1], conversation.tools, add_generation_prompt=False)
            if not np.array_equal(alone.token_ids, whole.token_ids[: len(alone.token_ids)]):
                apart.add(number)
                yield alone, {number}
    yield whole, wanted - apart


def _count_stop_tokens(rendered: RenderedPrompt, start: int, stop: int, stop_ids: Sequence[int]) -> int:
    """How many tokens behind a body belong to what is learned: up to the one that ends a reply."""
    behind = rendered.token_ids[start:stop].tolist()
    return next((at for at, id in enumerate(behind, 1) if id in stop_ids), 0)
