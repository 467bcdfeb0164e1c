"""`ramify show RUN [ROLLOUT]`: list the rollouts of a run, a page at a time, or print one as a tree."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.cli.parser import CommandParser

if TYPE_CHECKING:
    from ramify.run.store import RunStore


def run(argv: Sequence[str]) -> int:
    """List the rollouts of a run with a report, or print the traces of one rollout."""
    options = _parse_options(argv)
    from ramify.cli.rollout_list import ListRequest, print_rollouts
    from ramify.cli.run_lookup import find_rollout, open_run_readonly
    from ramify.core.console import make_console  # loaded here, not for help
    from ramify.rollout.evals.report import build_report
    from ramify.rollout.evals.trace_view import render_trace_tree

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


def _print_tokens(store: "RunStore", rollout: str | None) -> int:
    """Print the tokens of a rollout; without one, compare all trained tokens of the run with the sampled ones."""
    from ramify.cli.run_lookup import find_rollout  # loaded here, not for help
    from ramify.view.queries import RunQueries
    from ramify.view.token_check import check_trained_tokens

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


def _parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.limit < 0:
        parser.error(f"--limit: expected 0 (for all) or more, found {options.limit}")
    if options.page < 1:
        parser.error(f"--page: expected 1 or more, found {options.page}")
    has_filter = options.worst or options.best or options.failed or options.source is not None
    if options.rollout is not None and has_filter:
        parser.error("--source, --failed, --worst and --best select from the list; they cannot be used with ROLLOUT")
    return options


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("show")
    parser.add_run_argument()
    parser.add_argument(
        "rollout", metavar="ROLLOUT", nargs="?", help="rollout id or unique prefix; omit to list rollouts"
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="rollouts per page (20); 0 lists all")
    parser.add_argument("--page", type=int, default=1, metavar="N", help="page to list (1)")
    parser.add_argument("--source", metavar="NAME", help="only rollouts of this source, such as eval/held-out")
    parser.add_argument(
        "--failed", action="store_true", help="only rollouts with a failure of the system or of the policy"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    order.add_argument("--best", action="store_true", help="highest rewards first")
    parser.add_argument("--full", action="store_true", help="show long messages of a rollout untruncated")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="print the tokens of ROLLOUT with their values; without ROLLOUT, check that trained tokens were sampled",
    )
    parser.add_argument("--pass-threshold", type=float, default=1.0, help="minimum reward of a passing rollout")
    return parser
