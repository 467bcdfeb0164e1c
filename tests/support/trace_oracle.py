"""The trace read the slow and obvious way: parent by parent, token by token, from `Node` views alone.

Nothing here uses runs, columns or any search of the graph, so an error there cannot hide in the expectation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ramify.trace import Branch, Node, Trace
from tests.support.trace_scripts import Script

Images = list[tuple[int, int, str]]


def path(trace: Trace, node: int) -> list[Node]:
    """The nodes from the root to `node`, by following parents."""
    nodes: list[Node] = []
    while node >= 0:
        nodes.append(trace.nodes[node])
        node = nodes[-1].parent
    return nodes[::-1]


def tokens_to(trace: Trace, node: int) -> list[int]:
    return [int(token) for step in path(trace, node) for token in step.token_ids]


def images_to(trace: Trace, node: int) -> Images:
    """The images on the path to `node`, counted from the path's first token."""
    spans: Images = []
    offset = 0
    for step in path(trace, node):
        spans += [(offset + ref.start, offset + ref.stop, trace.graph.media[ref.media].hash) for ref in step.media]
        offset += len(step.token_ids)
    return spans


def is_prefix(trace: Trace, node: int, prompt: list[int], images: Images) -> bool:
    """Whether the path to `node` is a prefix of the prompt, in tokens and in images."""
    tokens = tokens_to(trace, node)
    shown = [image for image in images if image[0] < len(tokens)]
    return prompt[: len(tokens)] == tokens and images_to(trace, node) == shown


def longest_prefix(trace: Trace, prompt: list[int], images: Images, below: int = -1) -> tuple[int, int]:
    """The earliest node with tokens that ends the longest path which is a prefix, and that path's length.

    With `below`, only paths through that node count, and the node itself is the answer if nothing longer is.
    """
    best, length = below, len(tokens_to(trace, below))
    for node in trace.nodes:
        on_path = below < 0 or any(step.index == below for step in path(trace, node.index))
        if on_path and len(node.token_ids) and is_prefix(trace, node.index, prompt, images):
            size = len(tokens_to(trace, node.index))
            if size > length:
                best, length = node.index, size
    return best, length


def children(trace: Trace, parent: int) -> list[int]:
    return [node.index for node in trace.nodes if node.parent == parent]


def node_content(node: Node) -> dict[str, Any]:
    """Everything one node says, in values that compare."""
    return {
        "parent": node.parent,
        "message": node.message,
        "tokens": node.token_ids.tolist(),
        "sampled": node.sampled_span,
        "content": node.content_span,
        "logprobs": np.asarray(node.logprobs, "<f4").tobytes(),
        "versions": node.versions,
        "media": node.media,
        "arrays": {name: _array_content(array) for name, array in node.arrays.items()},
        "call": node.call,
        "trainable": node.is_trainable,
    }


def content(trace: Trace) -> dict[str, Any]:
    """Everything a trace says."""
    return {
        "header": msgspec.to_builtins(trace.header),
        "media": list(trace.graph.media),
        "nodes": [node_content(node) for node in trace.nodes],
    }


def _array_content(array: np.ndarray) -> tuple[str, tuple[int, ...], list[Any]]:
    return array.dtype.newbyteorder("<").str, array.shape, array.tolist()


def look_at_everything(trace: Trace) -> None:
    """Read all that a reader of traces may ask for."""
    content(trace)
    for branch in trace.branches:
        assert len(branch.messages) == len(branch.nodes)
        assert len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs) == len(branch)
        assert branch.num_turns >= 0
    for node in trace.nodes:
        assert node.children == children(trace, node.index)
    assert (
        isinstance(trace.is_truncated, bool) and isinstance(trace.last_reply, str) and trace.sampled_nodes is not None
    )


def assert_records_script(trace: Trace, nodes: Iterable[int], script: Script) -> None:
    """Each call's node says exactly what the engine saw and sampled."""
    for node, turn, seen in zip(nodes, script.turns, script.seen, strict=True):
        view, branch = trace.nodes[node], Branch(trace, node)
        assert tokens_to(trace, node) == seen.prompt + seen.sampled
        assert images_to(trace, node) == seen.images
        start, stop = view.sampled_span
        assert view.token_ids[start:stop].tolist() == seen.sampled and stop == len(view.token_ids)
        assert view.logprobs.dtype == np.float32 and view.logprobs.tolist() == [float(x) for x in seen.logprobs]
        assert branch.token_ids.tolist() == seen.prompt + seen.sampled
        assert_branch(branch)
        assert branch.sampled_mask[len(seen.prompt) :].all()
        assert branch.logprobs[len(seen.prompt) :].tolist() == [float(x) for x in seen.logprobs]
        assert (view.call, view.message, view.versions) == (turn.call, seen.message, seen.versions)
        assert view.is_trainable is turn.trainable
        assert {name: array.tolist() for name, array in view.arrays.items()} == {
            name: array.tolist() for name, array in turn.arrays.items()
        }


def assert_branch(branch: Branch) -> None:
    """Mask and logprobs of a branch, token by token."""
    mask: list[bool] = []
    logprobs: list[float] = []
    for node in path(branch.trace, branch.leaf):
        start, stop = node.sampled_span
        node_logprobs = iter(node.logprobs.tolist())
        for i in range(len(node.token_ids)):
            mask.append(start <= i < stop)
            logprobs.append(next(node_logprobs) if mask[-1] else float("nan"))
        assert next(node_logprobs, None) is None
    assert branch.sampled_mask.tolist() == mask
    np.testing.assert_array_equal(branch.logprobs, np.array(logprobs, np.float32))
    assert branch.messages == [node.message for node in path(branch.trace, branch.leaf)]
