"""`ramify view [OUTPUTS]`: a local page for the runs in a folder; `--export` writes one run as a file instead."""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser

DEFAULT_FOLDER = "outputs"
DEFAULT_PORT = 7420


def run(argv: Sequence[str]) -> int:
    """Serve the page until interrupted, or write a file."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.rollout and not options.export:
        parser.error("--rollout chooses what is exported; give --export FILE too")
    folder = _find_folder(options.outputs)
    if options.export:
        return _export(folder, Path(options.export), options.rollout)
    asyncio.run(_serve(folder, options))
    return 0


def _find_folder(outputs: str) -> Path:
    """Return the folder with this path, or the run with this name. The default folder need not exist yet."""
    from ramify.cli.run_lookup import find_run  # loaded here, not for help

    return Path(outputs) if outputs == DEFAULT_FOLDER or Path(outputs).is_dir() else find_run(outputs)


def _export(folder: Path, file: Path, rollouts: Sequence[str]) -> int:
    """Write the only run of a folder to a file."""
    from ramify.view.export import export_run, find_only_run  # loaded here, not for help
    from ramify.view.queries import RunQueries

    with contextlib.closing(RunQueries(folder)) as queries:
        count = export_run(queries, find_only_run(queries), file, rollouts)
    print(f"wrote {file}, with {count} rollout{'' if count == 1 else 's'}")
    return 0


async def _serve(folder: Path, options: argparse.Namespace) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    from ramify.view.serving import open_browser, serve_page  # loaded here, not for help

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def announce(address: str) -> None:
        print(f"the runs in {folder} are shown at {address}\nstop with Ctrl-C", flush=True)
        if options.open:
            open_browser(address)

    await serve_page(folder, stop, announce, host=options.host, port=options.port, allowed_hosts=options.allow_host)


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("view")
    parser.add_argument(
        "outputs",
        metavar="OUTPUTS",
        nargs="?",
        default=DEFAULT_FOLDER,
        help=f"folder of runs, or one run ({DEFAULT_FOLDER})",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port ({DEFAULT_PORT}); 0 takes a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need the printed token"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name under which a proxy serves the page; readers need the printed token",
    )
    parser.add_argument("--export", metavar="FILE", help="write the run OUTPUTS as one HTML file, and exit")
    parser.add_argument(
        "--rollout", action="append", default=[], metavar="ID", help="rollout in the file (the worst and the best)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser
