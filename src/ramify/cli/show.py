"""`ramify show RUN [ROLLOUT]`: list the rollouts of a run, a page at a time, or print one as a tree.

For the list, only the rows of the index are read, no traces. Lines are printed while rows are read, so the column
widths depend on the first rows only.
"""

import heapq
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Literal

from ramify.cli.run_lookup import find_rollout, open_run_readonly
from ramify.cli.trace_tree import render_trace_tree
from ramify.core.console import make_console
from ramify.core.errors import ConfigInvalid
from ramify.rollout.evals.report import build_report
from ramify.rollout.evals.rows import total_seconds
from ramify.run.store import RolloutRecord, RunStore
from ramify.view.queries import RunQueries
from ramify.view.training_record import check_trained_tokens

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
