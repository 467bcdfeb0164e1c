"""`ramify view [OUTPUTS]`: a local page for the runs in a folder; `--export` writes one run as a file instead."""

import argparse
import asyncio
import contextlib
import signal
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser

DEFAULT_PORT = 7420


def run(argv: Sequence[str]) -> int:
    """Serve the page until interrupted, or write a file."""
    options = _build_parser().parse_args(argv)
    asyncio.run(_serve(options))
    return 0


async def _serve(options: argparse.Namespace) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    from ramify.view.access import is_loopback, make_token  # loaded here, not for help
    from ramify.view.queries import RunQueries
    from ramify.view.server import build_app
    from ramify.wire.http_server import HttpServer

    token = None if is_loopback(options.host) else make_token()
    queries, stop = RunQueries(Path(options.outputs)), asyncio.Event()
    app = build_app(queries, token=token, hosts=tuple(options.allow_host))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with contextlib.closing(queries):
        async with HttpServer(app, options.host, options.port, name="--port") as server:
            address = server.address + (f"/?token={token}" if token else "")
            print(f"the runs in {options.outputs} are shown at {address}; stop with Ctrl-C", flush=True)
            if options.open:
                webbrowser.open(address)
            await stop.wait()


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("view")
    parser.add_argument(
        "outputs", metavar="OUTPUTS", nargs="?", default="outputs", help="folder of runs, or one run (outputs)"
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
        help="host name under which a proxy serves the page",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser
