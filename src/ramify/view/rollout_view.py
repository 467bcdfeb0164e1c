"""One rollout as plain data: the messages of its traces as trees, rewards, timing and training; and as Markdown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ramify.orchestrate.batches import BatchGroup
from ramify.run.store import RolloutRecord
from ramify.run.store.image_store import format_content, label_images
from ramify.trace import Annotation, Forest, MediaPart, Message, Node, Trace
from ramify.view.token_view import FloatArray, TokenMeasures, TokenTexts, round_value
from ramify.view.training_record import GroupTraining

MAX_TOKENS = 20_000  # of a forest that is sent token by token; a longer one is sent in bins
MAX_BINS = 200  # per segment


def describe_forest(
    group: BatchGroup, attempts: Sequence[Sequence[Trace]], seq_len: int | None, texts: TokenTexts
) -> dict[str, Any]:
    """Return the merged forest of a group: its segments, with the advantage of each token.

    A segment is a part without forks, which the page draws once, as the trainer computes it once. `attempts` are the
    traces of each attempt; the page numbers them in this order.
    """
    forest = group.build_forest([trace for traces in attempts for trace in traces], seq_len)
    numbers = {trace.id: number for number, traces in enumerate(attempts) for trace in traces}
    advantages = _average_advantages(forest)
    segments: list[dict[str, Any]] = []
    for row, members in zip(forest.segments, _find_attempts(forest, numbers)):
        tokens = slice(int(row["start"]), int(row["start"] + row["length"]))
        segment: dict[str, Any] = {name: int(row[name]) for name in ("depth", "length", "parent")}
        segment["attempts"] = members
        if len(forest) > MAX_TOKENS:
            segment["values"] = _bin(advantages[tokens])
        else:
            segment["values"] = [round_value(value) for value in advantages[tokens]]
            segment["texts"] = texts.decode(forest.token_ids[tokens].tolist())
        segments.append(segment)
    return {
        "segments": segments,
        "tokens": forest.num_tokens,
        "flat_tokens": forest.flat_tokens,
        "overlong": len(forest.dropped.overlong_calls),
        "left_out": sorted(set(numbers.values()) - {numbers[id] for id in forest.traces}),
    }


def annotate_all(
    number: int, source: str, attempts: Sequence[Sequence[Trace]], advantages: Sequence[float | None]
) -> BatchGroup:
    """Return a group with every sampled node annotated, for attempts that are in no batch."""
    annotations = tuple(
        Annotation(trace.id, node, advantage=advantage or 0.0)
        for traces, advantage in zip(attempts, advantages, strict=True)
        for trace in traces
        for node in trace.sampled_nodes
    )
    return BatchGroup(number, source, 1.0, (), annotations)


def _average_advantages(forest: Forest) -> FloatArray:
    """Return the mean advantage of the entries of each token; NaN for tokens that are not trained."""
    indices = forest.targets.token_index
    counts = np.bincount(indices, minlength=len(forest))
    sums = np.bincount(indices, weights=forest.targets.advantage, minlength=len(forest))
    with np.errstate(invalid="ignore"):
        return sums / counts


def _find_attempts(forest: Forest, numbers: dict[str, int]) -> list[list[int]]:
    """Return for each segment the attempts whose trained paths go through it."""
    members: list[set[int]] = [set() for _ in forest.segments]
    owners = np.searchsorted(forest.segments["start"], forest.targets.token_index, "right") - 1
    pairs = set(zip(owners.tolist(), forest.expand_call_column("trace").tolist()))
    for segment, trace in pairs:
        number = numbers[forest.traces[trace]]
        while segment >= 0 and number not in members[segment]:
            members[segment].add(number)
            segment = int(forest.segments["parent"][segment])
    return [sorted(attempts) for attempts in members]


def _bin(values: FloatArray) -> list[float | None]:
    """Return the means of at most MAX_BINS parts; None for a part without a value."""
    parts = np.array_split(values, min(MAX_BINS, max(1, len(values))))
    return [None if np.isnan(part).all() else round_value(np.nanmean(part)) for part in parts]


MAX_MESSAGE_CHARS = 20_000  # of one message that is sent at once; the page asks for more


def describe_rollout(
    record: RolloutRecord, measures: Sequence[TokenMeasures], training: GroupTraining | None, texts: TokenTexts
) -> dict[str, Any]:
    """Return a rollout without its tokens. `measures` describe its traces."""
    return {
        "id": record.id,
        "source": record.source,
        "task": record.task,
        "reward": record.reward,
        "failure": record.failure,
        "stop": record.summary.get("stop", ""),
        "truncated": bool(record.summary.get("truncated")),
        "timing": record.summary.get("timing", {}),
        "group": None if training is None else training.to_dict(),
        "advantage": None if training is None else training.get_advantage(measures[0].trace.attempt),
        "traces": [_describe_trace(entry, texts) for entry in measures],
    }


def read_message_text(trace: Trace, node: int, start: int, count: int) -> dict[str, Any]:
    """Return a part of the text of a message, for messages that are not sent at once."""
    text = trace.nodes[node].message.text
    stop = min(start + count, len(text))
    return {"text": text[start:stop], "stop": stop}


def format_markdown(record: RolloutRecord, traces: Sequence[Trace], training: GroupTraining | None) -> str:
    """Return a rollout as Markdown. What models and tasks wrote is in code, so that it cannot change the document."""
    return "\n".join(_iter_markdown(record, traces, training)) + "\n"


def _describe_trace(measures: TokenMeasures, texts: TokenTexts) -> dict[str, Any]:
    trace = measures.trace
    forks = {fork["node"]: fork for fork in trace.info.get("forks", [])}
    excluded = {entry["node"]: str(entry["reason"]) for entry in trace.info.get("untrained", [])}
    hidden = ("forks", "untrained", "refusals")
    return {
        "agent": trace.agent,
        "rewards": {name: entry and list(entry) for name, entry in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "errors": [{"name": error.name, "message": error.message, "blame": error.blame} for error in trace.errors],
        "task": _clip_values(trace.task),
        "info": _clip_values({key: value for key, value in trace.info.items() if key not in hidden}),
        "refusals": trace.info.get("refusals", []),
        "tokens": trace.total_tokens,
        "sampled": trace.completion_len,
        "branches": len(trace.leaves),
        "measures": measures.list_measures(texts),
        "nodes": [_describe_node(node, forks, measures.explain_untrained(node, excluded)) for node in trace.nodes],
    }


def _describe_node(node: Node, forks: Mapping[int, Any], untrained: str) -> dict[str, Any]:
    message, call = node.message, node.call
    start, stop = node.sampled_span
    text = message.text
    fields: dict[str, Any] = {
        "index": node.index,
        "parent": node.parent,
        "role": message.role,
        "text": text[:MAX_MESSAGE_CHARS],
        "shown": min(len(text), MAX_MESSAGE_CHARS),
        "chars": len(text),
        "tokens": len(node.token_ids),
        "sampled": stop - start,
        "untrained": untrained,
    }
    if message.reasoning:
        fields["reasoning"] = _clip(message.reasoning)
    if message.tool_calls:
        fields["calls"] = [{"name": call.name, "arguments": _clip(call.arguments)} for call in message.tool_calls]
    if media := _list_media(node.trace, message):
        fields["media"] = media
    if node.index in forks:
        fields["fork"] = forks[node.index]
    if call is not None:
        fields["finish"] = call.finish_reason
        fields["seconds"] = [call.start_time, call.end_time]
        fields["usage"] = msgspec.structs.asdict(call.usage)
    return fields


def _list_media(trace: Trace, message: Message) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return []
    mimes = {media.hash: media.mime for media in trace.graph.media}
    hashes = [part.hash for part in message.content if isinstance(part, MediaPart)]
    return [{"hash": hash, "mime": mimes.get(hash, "")} for hash in hashes]


def _clip_values(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a table as texts of bounded length."""
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in table.items()
    }
    return {key: _clip(text) for key, text in texts.items()}


def _clip(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


def _iter_markdown(record: RolloutRecord, traces: Sequence[Trace], training: GroupTraining | None) -> Iterator[str]:
    yield f"# Rollout {_quote(record.id)}\n"
    if record.source:
        yield f"- source: {_quote(record.source)}"
    yield f"- task: {_quote(record.task)}"
    if training is not None:
        yield f"- group: {training.group.number}, {_describe_group_state(training)}"
    yield f"- reward: {'missing' if record.reward is None else f'{record.reward:.4g}'}"
    if training is not None and (advantage := training.get_advantage(traces[0].attempt)) is not None:
        yield f"- advantage: {advantage:.4g}"
    yield f"- stop: {_quote(record.failure or str(record.summary.get('stop', '')))}"
    for trace in traces:
        for name, entry in trace.rewards.items():
            yield f"- {_quote(name)}: {'missing' if entry is None else f'{entry[0]:.4g}, weight {entry[1]:g}'}"
        labels = label_images(trace)
        yield f"\n## {_quote(trace.agent) if trace.agent else 'Messages'}\n"
        for node in trace.nodes:
            parent = f", after [{node.parent}]" if node.parent >= 0 and node.parent != node.index - 1 else ""
            yield f"### [{node.index}] {node.message.role}{parent}\n"
            if node.message.reasoning:
                yield f"Reasoning:\n\n{_fence(node.message.reasoning)}\n"
            if text := format_content(node.message, labels):
                yield f"{_fence(text)}\n"
            for call in node.message.tool_calls:
                yield f"Call of {_quote(call.name)}:\n\n{_fence(call.arguments, 'json')}\n"


def _describe_group_state(training: GroupTraining) -> str:
    group = training.group
    if group.reason is not None:
        return f"dropped: {group.reason.value}" + (f" ({_quote(group.detail)})" if group.detail else "")
    return group.state.value if group.step is None else f"{group.state.value} in step {group.step}"


def _fence(text: str, language: str = "") -> str:
    """Return the text in a code fence that is longer than every fence in the text."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


def _quote(text: str) -> str:
    """Return a name as code in one line, so that it cannot change the document."""
    return f"`{' '.join(text.replace('`', ' ').split())}`"
