"""`ramify view [OUTPUTS]`: a local page for the runs in a folder; `--export` writes one run as a file instead."""

import asyncio
import contextlib
import signal
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.commands import DEFAULT_FOLDER
from ramify.core.errors import ConfigInvalid
from ramify.run.lookup import find_run
from ramify.view.export import export_run, find_only_run
from ramify.view.queries import RunQueries
from ramify.view.server import open_browser, serve_page


def run(options: Namespace) -> int:
    """Serve the page until interrupted, or write a file."""
    if options.rollout and not options.export:
        raise ConfigInvalid("--rollout chooses what is exported; give --export FILE too")
    folder = _find_folder(options.outputs)
    if options.export:
        return _export(folder, Path(options.export), options.rollout)
    asyncio.run(_serve(folder, options))
    return 0


def _find_folder(outputs: str) -> Path:
    """Return the folder with this path, or the run with this name. The default folder need not exist yet."""
    return Path(outputs) if outputs == DEFAULT_FOLDER or Path(outputs).is_dir() else find_run(outputs)


def _export(folder: Path, file: Path, rollouts: Sequence[str]) -> int:
    """Write the only run of a folder to a file."""
    with contextlib.closing(RunQueries(folder)) as queries:
        count = export_run(queries, find_only_run(queries), file, rollouts)
    print(f"wrote {file}, with {count} rollout{'' if count == 1 else 's'}")
    return 0


async def _serve(folder: Path, options: Namespace) -> None:
    """Serve the page until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def announce(address: str) -> None:
        print(f"the runs in {folder} are shown at {address}\nstop with Ctrl-C", flush=True)
        if options.open:
            open_browser(address)

    await serve_page(folder, stop, announce, host=options.host, port=options.port, allowed_hosts=options.allow_host)
