"""A trace as a tree in the terminal: nodes without a fork form a list, a fork opens a level.

Each entry is one node: role, number of tokens, how many of them were sampled, and the finish reason. A branch starts
with the reason of its fork.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ramify.core.names import format_count
from ramify.core.terminal import escape_controls
from ramify.run.store.image_store import ImageStore, format_content, label_images
from ramify.trace import Node, Trace

MAX_EXCERPT_CHARS = 400
MAX_RESULT_CHARS = 100  # of the arguments and of the result of a tool call
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def render_trace_tree(trace: Trace, *, full: bool = False, images: ImageStore | None = None) -> RenderableType:
    """Return the trace as a tree, with its rewards and errors below.

    `full` shows long messages untruncated. `images` is the image store of the trace's run.
    """
    forks = {fork["node"]: _format_fork(fork) for fork in trace.info.get("forks", [])}
    untrained = {entry["node"]: str(entry["reason"]) for entry in trace.info.get("untrained", [])}
    tree = Tree(_format_title(trace))
    roots = [node.index for node in trace.nodes if node.parent < 0]
    _add_subtrees(tree, trace, roots, NodeLabels(forks, untrained, label_images(trace, images)), full)
    notes = (*_format_untrained(trace, untrained), *_format_tool_calls(trace), *_format_refusals(trace))
    return Group(tree, *_format_scores(trace), *notes)


class NodeLabels(NamedTuple):
    """Remarks on nodes, by node index: why a branch forks there, and why a call is not trained; images by hash."""

    forks: Mapping[int, str]
    untrained: Mapping[int, str]
    images: Mapping[str, str]


def _add_subtrees(tree: Tree, trace: Trace, first_nodes: list[int], labels: NodeLabels, full: bool) -> None:
    """Add the subtrees of `first_nodes`. Not recursive, because a conversation may fork a thousand times."""
    pending = [(tree, first_nodes)]
    while pending:
        level, nodes = pending.pop()
        for start in nodes:
            branch_tree = (
                level.add(Text(labels.forks.get(start, "first"), style="magenta")) if len(nodes) > 1 else level
            )
            index, children = start, [start]
            while len(children) == 1:
                index = children[0]
                fork = "" if len(nodes) > 1 else labels.forks.get(index, "")
                branch_tree.add(_format_node(trace.nodes[index], full, fork, labels))
                children = trace.nodes[index].children
            if children:
                pending.append((branch_tree, children))


def _format_node(node: Node, full: bool, fork: str, labels: NodeLabels) -> Text:
    message = node.message
    untrained = labels.untrained.get(node.index, "")
    sampled = node.sampled_span[1] - node.sampled_span[0]
    counts = f"{len(node.token_ids)} tokens" + (f", {sampled} sampled" if sampled else "")
    if node.call is not None:
        usage = node.call.usage
        if not len(node.token_ids):
            counts = f"{usage.prompt_tokens} in, {usage.completion_tokens} out by the server's count"
        counts += f", {node.call.finish_reason}"
        if untrained:
            counts += f", not trained: {untrained}"
        elif not node.is_trainable:
            counts += f", by {node.call.served_model or 'another model'}"
    line = Text.assemble(
        (message.role, f"bold {ROLE_STYLES.get(message.role, 'white')}"), " ", (f"[{node.index}] {counts}", "dim")
    )
    if fork:
        line.append(f" fork: {fork}", "magenta")
    if message.reasoning:
        line.append(f"\n[reasoning] {_excerpt(message.reasoning, full)}", "dim italic")
    if content := format_content(message, labels.images):
        line.append(f"\n{_excerpt(content, full)}")
    for call in message.tool_calls:
        line.append(f"\n-> {call.name}({_excerpt(call.arguments, full)})", "yellow")
    return line


def _format_scores(trace: Trace) -> list[Text]:
    lines = [Text(f"reward {'missing' if trace.reward is None else format(trace.reward, '.4g')}", style="bold")]
    for name, entry in trace.rewards.items():
        lines.append(Text(f"  {name}: " + ("missing" if entry is None else f"{entry[0]:.4g} x {entry[1]:g}")))
    lines += [Text(f"  {name} = {value:.4g}", style="dim") for name, value in trace.metrics.items()]
    if trace.stop:
        lines.append(Text(f"stop {trace.stop}"))
    lines += [Text(f"{error.name}: {error.message}", style="red") for error in trace.errors]
    return lines


def _format_untrained(trace: Trace, untrained: Mapping[int, str]) -> list[Text]:
    """Return the number of calls that are not trained; the tree shows the reason at each of them."""
    if not untrained:
        return []
    nodes = ", ".join(f"[{node}]" for node in untrained)
    return [Text(f"{len(untrained)} of {len(trace.sampled_nodes)} calls are not trained: {nodes}", style="dim")]


def _format_tool_calls(trace: Trace) -> list[Text]:
    """Return one line for each call of a tool of the taskset that an agent made over MCP."""
    lines: list[Text] = []
    for call in trace.info.get("tool_calls", []):
        result = " ".join(str(call["result"]).split())[:MAX_RESULT_CHARS]
        text = f"tool after [{call['node']}]: {call['tool']}({call['arguments'][:MAX_RESULT_CHARS]}) -> {result}"
        lines.append(Text(escape_controls(text), style="red" if call["is_error"] else "dim"))
    return lines


def _format_refusals(trace: Trace) -> list[Text]:
    """Return one line for each kind of request that the gateway refused."""
    lines: list[Text] = []
    for entry in trace.info.get("refusals", []):
        times = f" ({entry['count']} times)" if entry["count"] > 1 else ""
        text = f"refused {entry['path']}: {entry['status']} {entry['name']}: {entry['message']}{times}"
        lines.append(Text(text, style="red"))
    return lines


def _format_title(trace: Trace) -> Text:
    sampled = sum(node.sampled_span[1] - node.sampled_span[0] for node in trace.nodes)
    total = sum(len(node.token_ids) for node in trace.nodes)
    agent = f" {trace.agent}" if trace.agent else ""
    numbers = {"message": len(trace.nodes), "branch": len(trace.leaves), "token": total}
    counts = ", ".join([*(format_count(number, noun) for noun, number in numbers.items()), f"{sampled} sampled"])
    return Text.assemble((f"{trace.id}{agent}", "bold"), "  ", (counts, "dim"))


def _format_fork(fork: Mapping[str, object]) -> str:
    detail = fork.get("detail")
    return f"{fork.get('reason', 'branch')} at [{fork.get('at')}]" + (f": {detail}" if detail else "")


def _excerpt(text: str, full: bool) -> str:
    text = escape_controls(text.strip())
    return text if full or len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}... ({len(text)} characters)"
