"""One rollout as plain data: the messages of its traces as trees, rewards, timing and training; and as Markdown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.run.store import RolloutRecord
from ramify.run.store.image_labels import format_content, label_images
from ramify.trace import MediaPart, Message, Node, Trace
from ramify.view.token_view import TokenMeasures, TokenTexts
from ramify.view.training_record import GroupTraining

MAX_MESSAGE_CHARS = 20_000  # of one message that is sent at once; the page asks for more


def describe_rollout(
    record: RolloutRecord, measures: Sequence[TokenMeasures], training: GroupTraining | None, texts: TokenTexts
) -> dict[str, Any]:
    """Return a rollout without its tokens. `measures` describe its traces."""
    attempt = measures[0].trace.attempt
    return {
        "id": record.id,
        "source": record.source,
        "task": record.task,
        "repetition": record.repetition,
        "reward": record.reward,
        "failure": record.failure,
        "stop": record.summary.get("stop", ""),
        "truncated": bool(record.summary.get("truncated")),
        "timing": record.summary.get("timing", {}),
        "group": None if training is None else training.to_dict(),
        "attempt": None if training is None else attempt,
        "advantage": None if training is None else training.get_advantage(attempt),
        "traces": [_describe_trace(entry, texts) for entry in measures],
    }


def read_message_text(trace: Trace, node: int, start: int, count: int) -> dict[str, Any]:
    """Return a part of the text of a message, for messages that are not sent at once."""
    text = trace.nodes[node].message.text
    stop = min(start + count, len(text))
    return {"text": text[start:stop], "start": start, "stop": stop, "chars": len(text)}


def format_markdown(record: RolloutRecord, traces: Sequence[Trace], training: GroupTraining | None) -> str:
    """Return a rollout as Markdown. What models and tasks wrote is in code, so that it cannot change the document."""
    return "\n".join(_iter_markdown(record, traces, training)) + "\n"


def _describe_trace(measures: TokenMeasures, texts: TokenTexts) -> dict[str, Any]:
    trace = measures.trace
    forks = {fork["node"]: fork for fork in trace.info.get("forks", [])}
    excluded = {entry["node"]: str(entry["reason"]) for entry in trace.info.get("untrained", [])}
    hidden = ("forks", "untrained", "refusals")
    return {
        "id": trace.id,
        "agent": trace.agent,
        "reward": trace.reward,
        "rewards": {name: entry and list(entry) for name, entry in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "errors": [{"name": error.name, "message": error.message, "blame": error.blame} for error in trace.errors],
        "stop": trace.stop,
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
        fields["model"] = call.served_model
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
