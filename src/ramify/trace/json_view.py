"""The JSON view of a trace, for people: all messages and counts, but no token ids and no arrays."""

from typing import Any

import msgspec

from ramify.trace.header import TRACE_SCHEMA
from ramify.trace.message import ModelCall
from ramify.trace.trace import Node, Trace


def to_json(trace: Trace, *, indent: int | None = None) -> str:
    """Return the trace as JSON, for reading and searching; only the binary form can be decoded."""
    text = msgspec.json.encode(to_dict(trace))
    return (msgspec.json.format(text, indent=indent) if indent is not None else text).decode()


def to_dict(trace: Trace) -> dict[str, Any]:
    """Return the content of `to_json` as a dict."""
    header: dict[str, Any] = msgspec.to_builtins(trace.header)
    media = [{"hash": item.hash, "mime": item.mime, "bytes": len(item.data)} for item in trace.graph.media]
    nodes = [_node_to_dict(node) for node in trace.nodes]
    return {"schema": TRACE_SCHEMA, **header, "reward": trace.reward, "media": media, "nodes": nodes}


def _node_to_dict(node: Node) -> dict[str, Any]:
    start, stop = node.sampled_span
    fields: dict[str, Any] = {
        "index": node.index,
        "parent": node.parent,
        "message": msgspec.to_builtins(node.message),
        "tokens": len(node.token_ids),
        "sampled": stop - start,
    }
    if node.call is not None:
        fields["call"] = _call_to_dict(node.call)
        fields["versions"] = [msgspec.structs.asdict(run) for run in node.versions]
        fields["trainable"] = node.is_trainable
    if node.media:
        fields["media"] = [ref._asdict() for ref in node.media]
    if node.arrays:
        fields["arrays"] = {name: f"{array.dtype}{list(array.shape)}" for name, array in node.arrays.items()}
    return fields


def _call_to_dict(call: ModelCall) -> dict[str, Any]:
    usage = call.usage
    return {
        "id": call.id,
        "requested": call.requested_model,
        "served": call.served_model,
        "sampling": call.sampling_params,
        "finish": call.finish_reason,
        "start": call.start_time,
        "end": call.end_time,
        "usage": {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "cached": usage.cached_tokens},
    }
