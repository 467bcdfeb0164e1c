"""`ramify show RUN [ROLLOUT]`: the rollouts of a run, a page at a time, or one of them as a tree."""

import argparse
from collections.abc import Sequence

from ramify.cli.parser import CommandParser


def run(args: Sequence[str]) -> int:
    """List the rollouts of a run and summarise them, or print the traces of one."""
    asked = _parse(args)
    from ramify.cli.rollout_list import ListRequest, print_rollouts  # loaded here, not for help
    from ramify.cli.runs import open_named, paper, pick
    from ramify.evals.report import build_report
    from ramify.evals.trace_view import render_trace_tree

    console = paper()
    with open_named(asked.run) as store:
        if asked.rollout is not None:
            for trace in store.read_traces(pick(store, asked.rollout).id):
                console.print(render_trace_tree(trace, full=asked.full))
            return 0
        order = "worst" if asked.worst else "best" if asked.best else "index"
        request = ListRequest(asked.limit, asked.page, asked.source, asked.failed, order)
        print_rollouts(store, request, print)
        where = {} if asked.source is None else {"source": asked.source}
        console.print(build_report(store.rollouts(**where), threshold=asked.threshold))
    return 0


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    asked = parser.parse_args(args)
    if asked.limit < 0:
        parser.error(f"--limit: expected 0 (for all) or more, found {asked.limit}")
    if asked.page < 1:
        parser.error(f"--page: expected 1 or more, found {asked.page}")
    chosen = asked.worst or asked.best or asked.failed or asked.source is not None
    if asked.rollout is not None and chosen:
        parser.error("--source, --failed, --worst and --best select from the list; they cannot be used with ROLLOUT")
    return asked


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify show", description=COMMANDS["show"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    parser.add_argument(
        "rollout", metavar="ROLLOUT", nargs="?", help="its id, or how it begins; without, a page of them is listed"
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="rollouts on a page (20); 0 lists all")
    parser.add_argument("--page", type=int, default=1, metavar="N", help="which page (1)")
    parser.add_argument("--source", metavar="NAME", help="only those of this source, such as eval/held-out")
    parser.add_argument(
        "--failed", action="store_true", help="only rollouts that ended with a failure, of the system or of the policy"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="the lowest rewards first")
    order.add_argument("--best", action="store_true", help="the highest rewards first")
    parser.add_argument("--full", action="store_true", help="show every message of a rollout to its end")
    parser.add_argument("--threshold", type=float, default=1.0, help="the reward from which a rollout passes")
    return parser
