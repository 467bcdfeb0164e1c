"""`ramify env-server @ config.toml --source train/NAME`: one source behind an address, with worker processes."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ramify.config import parse, switch
from ramify.envserver.config import EnvServerConfig
from ramify.errors import PeerLost
from ramify.wire.address import check_bind

HELP = """usage: ramify env-server @ FILE [--source train/NAME] [-m MODEL] [-b URL] [-o RUN] [--dry-run]
"""
SHORT = {"-m": "--model.name", "-o": "--output"}


def run(args: Sequence[str]) -> int:
    """Read the configuration, serve until told to stop."""
    if "--help" in args or "-h" in args:
        print(HELP)
    dry, rest = switch(args, "--dry-run")
    config = parse(EnvServerConfig, _spelled_out(rest), prog="ramify env-server")
    picked = config.pick()
    if dry:
        address = picked.config.address or "a free port of this machine"
        check_bind(picked.config.address or "tcp://127.0.0.1:0", config.secret())
        print(f"would serve {picked.name} at {address}, {picked.config.pool}, log in {picked.log(config.output)}")
        return 0
    asyncio.run(serve(config))
    return 0


async def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, which lets attempts finish for a while."""
    from ramify.envserver.server import EnvServer

    sys.setswitchinterval(0.001)  # the threads of the connections wait for nobody
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    server = EnvServer(config)
    starting = asyncio.create_task(server.start())

    def stop() -> None:
        starting.cancel()
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    if starting.cancelled():
        return
    if config.address_file is not None:  # first: whoever reads the line may look for the file
        _write(config.address_file, server.address)
    print(f"serving {server.picked.name} at {server.address}", flush=True)
    waits = [asyncio.create_task(told.wait()), asyncio.create_task(server.wait_broken())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    broken = not told.is_set()
    await server.close(0.0 if broken else None)
    if broken:
        raise PeerLost("the thread of the server's connections has failed")


def _write(path: Path, address: str) -> None:
    """Whoever reads the file sees all of the address or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{address}\n")
    part.replace(path)


def _spelled_out(args: Sequence[str]) -> list[str]:
    found: list[str] = []
    for at, arg in enumerate(args):
        if arg == "-b":
            found += ["--inference.engine", "external", "--inference.base_url"]
        elif at and args[at - 1] == "-b":
            found.append(arg.rstrip("/").removesuffix("/v1"))
        else:
            found.append(SHORT.get(arg, arg))
    return found
