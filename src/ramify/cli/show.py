"""`ramify show RUN [ROLLOUT]`: list the rollouts of a run, a page at a time, or print one as a tree.

For the list, only the rows of the index are read, no traces. Lines are printed while rows are read, so the column
widths depend on the first rows only.

In a tree, nodes without a fork form a list, and a fork opens a level. Each entry is one node: role, number of tokens,
how many of them were sampled, and the finish reason. A branch starts with the reason of its fork.
"""

import heapq
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ramify.cli.run_lookup import find_rollout, open_run_readonly
from ramify.core.console import make_console
from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.core.terminal import escape_controls
from ramify.rollout.evals.progress import total_seconds
from ramify.rollout.evals.report import build_report
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.image_store import ImageStore, format_content, label_images
from ramify.trace import Node, Trace
from ramify.view.queries import RunQueries
from ramify.view.training_record import check_trained_tokens

MAX_EXCERPT_CHARS = 400
MAX_RESULT_CHARS = 100  # of the arguments and of the result of a tool call
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
SortOrder = Literal["index", "worst", "best"]
HEADER = ("rollout", "source", "reward", "calls", "tokens out", "seconds", "end")
WIDTH_SAMPLE_ROWS = 100  # first rows, which determine the column widths


@dataclass(frozen=True, slots=True)
class ListRequest:
    """The rollouts to list, and their order. `limit` is the size of a page; 0 lists all."""

    limit: int = 20
    page: int = 1
    source: str | None = None
    failed: bool = False
    order: SortOrder = "index"


def run(options: Namespace) -> int:
    """List the rollouts of a run with a report, or print the traces of one rollout."""
    _check_options(options)
    console = make_console()
    with open_run_readonly(options.run) as store:
        if options.tokens:
            return _print_tokens(store, options.rollout)
        if options.rollout is not None:
            for trace in store.read_traces(find_rollout(store, options.rollout).id):
                console.print(render_trace_tree(trace, full=options.full, images=store.images))
            return 0
        order = "worst" if options.worst else "best" if options.best else "index"
        request = ListRequest(options.limit, options.page, options.source, options.failed, order)
        print_rollouts(store, request, print)
        where = {} if options.source is None else {"source": options.source}
        console.print(build_report(store.rollouts(**where), pass_threshold=options.pass_threshold))
    return 0


def _print_tokens(store: RunStore, rollout: str | None) -> int:
    """Print the tokens of a rollout; without one, compare all trained tokens of the run with the sampled ones."""
    if rollout is None:
        check = check_trained_tokens(store)
        for problem in check.problems:
            print(problem)
        verdict = f"{len(check.problems)} calls differ" if check.problems else "each is the token that was sampled"
        print(f"{store.path}: {check.num_entries:,} trained entries in {check.num_batches} batches: {verdict}")
        return 1 if check.problems else 0
    queries, id = RunQueries(store.path), find_rollout(store, rollout).id
    name = store.path.resolve().name
    for number, trace in enumerate(queries.get_rollout(name, id)["traces"]):
        nodes = trace["nodes"]
        for node, tokens in zip(nodes, queries.iter_tokens(name, id, number, [node["index"] for node in nodes])):
            untrained = f", not trained: {node['untrained']}" if node["untrained"] else ""
            print(f"[{node['index']}] {node['role']}{untrained}")
            for at, (token_id, text) in enumerate(zip(tokens["ids"], tokens["texts"])):
                columns = {name: column[at] for name, column in tokens["values"].items() if column[at] is not None}
                values = " ".join(f"{name}={value:g}" for name, value in columns.items())
                print(f"  {token_id:>7} {text!r:<20} {values}".rstrip())
    return 0


def _check_options(options: Namespace) -> None:
    if options.limit < 0:
        raise ConfigInvalid(f"expected 0 (for all) or more, got {options.limit}", key="--limit")
    if options.page < 1:
        raise ConfigInvalid(f"expected 1 or more, got {options.page}", key="--page")
    has_filter = options.worst or options.best or options.failed or options.source is not None
    if options.rollout is not None and has_filter:
        raise ConfigInvalid("--source, --failed, --worst and --best select from the list; remove ROLLOUT")


def print_rollouts(store: RunStore, request: ListRequest, print_line: Callable[[str], None]) -> None:
    """Print the requested rollouts. Raises ConfigInvalid if the run has no rollout of the source."""
    if request.source is not None:
        _check_source(store, request.source)
    rows = _select_rows(store, request)
    shown = 0
    for line in _format_lines(rows if not request.limit else islice(rows, request.limit)):
        print_line(line)
        shown += 1
    if not shown:
        where = "" if request.source is None else f" of source {request.source}"
        print_line(
            f"no {'failed ' if request.failed else ''}rollouts{where}" + (" on this page" if request.page > 1 else "")
        )
    elif next(rows, None) is not None:
        print_line(f"more with --page {request.page + 1}, or --limit 0 for all; --worst, --failed and --source choose")
    print_line("")


def _check_source(store: RunStore, source: str) -> None:
    names = [str(name) for (name,) in store.select("SELECT DISTINCT source FROM rollouts ORDER BY source")]
    if source not in names:
        known = ", ".join(filter(None, names)) or "rollouts of no named source"
        raise ConfigInvalid(f"no rollouts of source {source!r}; the run has {known}")


def _select_rows(store: RunStore, request: ListRequest) -> Iterator[RolloutRecord]:
    """Yield the rows of the page and those after it; of sorted rows, at most one after the page."""
    where = {} if request.source is None else {"source": request.source}
    rows: Iterator[RolloutRecord] = store.iter_rollouts(**where)
    if request.failed:
        rows = (row for row in rows if row.failure is not None or row.summary.get("errors"))
    if request.order != "index":
        rows = iter(_sort_rows(rows, request))
    return islice(rows, request.limit * (request.page - 1), None)


def _sort_rows(rows: Iterable[RolloutRecord], request: ListRequest) -> list[RolloutRecord]:
    """Return the rows with a reward, sorted by it, up to one row after the page. Equal rewards keep their order."""
    scored = ((row.reward, row) for row in rows if row.reward is not None)
    if not request.limit:
        entries = sorted(scored, key=itemgetter(0), reverse=request.order == "best")
    else:
        select = heapq.nsmallest if request.order == "worst" else heapq.nlargest
        entries = select(request.limit * request.page + 1, scored, key=itemgetter(0))
    return [row for _, row in entries]


def _format_lines(rows: Iterable[RolloutRecord]) -> Iterator[str]:
    """Yield the header and one line per row. There is a source column if one of the first rows has a source."""
    iterator = iter(rows)
    head = [_build_cells(row) for row in islice(iterator, WIDTH_SAMPLE_ROWS)]
    if not head:
        return
    columns = [at for at, name in enumerate(HEADER) if name != "source" or any(cells[at] for cells in head)]
    widths = {at: max(len(cells[at]) for cells in (HEADER, *head)) for at in columns}
    yield _join_cells(HEADER, widths)
    for cells in head:
        yield _join_cells(cells, widths)
    for row in iterator:
        yield _join_cells(_build_cells(row), widths)


def _build_cells(row: RolloutRecord) -> tuple[str, ...]:
    reward = "missing" if row.reward is None else f"{row.reward:.3f}"
    calls, tokens = (str(row.summary.get(name, "")) for name in ("calls", "output"))
    return (
        row.id,
        row.source,
        reward,
        calls,
        tokens,
        f"{total_seconds(row):.2f}",
        row.failure or row.summary.get("stop", ""),
    )


def _join_cells(cells: tuple[str, ...], widths: dict[int, int]) -> str:
    return "  ".join(cells[at].ljust(width) for at, width in widths.items()).rstrip()


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
