"""`ramify env-server @ config.toml --source train/NAME`: serve one source with worker processes."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ramify.cli.short_flags import expand_short_flags
from ramify.core.config import parse_component, pop_flags
from ramify.core.errors import ConfigInvalid, PeerLost
from ramify.core.files import write_atomically
from ramify.launch.process_configs import build_env_server_config
from ramify.orchestrate.config import RunConfig
from ramify.processes.wire.address import check_bind_address
from ramify.rollout.envserver.config import EnvServerConfig

COMMAND_FLAGS = ("--dry-run",)
USAGE = """usage: ramify env-server @ FILE [--source train/NAME] [-m MODEL] [-b URL] [-o RUN] [--key value]

  FILE       a config file of this command, or of a whole run (as for `ramify rl`), from which this command takes one
             source, at its `address` or the port given by `launch.base_port`; flags are always the keys below
  --source   the source to serve, if there are several
  -b URL     address of a running inference server, if the file names none
  --dry-run  print what would be served and where, then exit

Keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration, and serve until SIGTERM or SIGINT."""
    (dry,), rest = pop_flags(expand_short_flags(argv), COMMAND_FLAGS)

    def build_part(run_config: RunConfig) -> dict[str, Any]:
        table = build_env_server_config(run_config, _get_source_flag(rest))
        if "inference" not in table and not any(arg.startswith("--inference") for arg in rest):
            raise ConfigInvalid("the run starts its own engine; give its address with -b URL", key="inference")
        return table

    config, _ = parse_component(
        EnvServerConfig,
        rest,
        RunConfig,
        build_part,
        prog="ramify env-server",
        usage=USAGE,
        command_flags=COMMAND_FLAGS,
    )
    selected = config.select_source()
    if dry:
        check_bind_address(selected.listen_address, config.load_secret())
        address = selected.listen_address if selected.config.address else "a free port of this machine"
        log_path = selected.log_path(config.output)
        print(f"would serve {selected.key} at {address}, {selected.config.pool}, log in {log_path}")
        return 0
    asyncio.run(serve(config))
    return 0


async def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let attempts finish within the grace period."""
    from ramify.rollout.envserver.server import EnvServer

    sys.setswitchinterval(0.001)  # keeps the latency of the connection threads low
    loop, stop_requested = asyncio.get_running_loop(), asyncio.Event()
    server = EnvServer(config)
    start_task = asyncio.create_task(server.start())

    def stop() -> None:
        start_task.cancel()
        stop_requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await start_task
    if start_task.cancelled():
        return
    if config.address_file is not None:  # before the line: a reader of the line may open the file
        config.address_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config.address_file, f"{server.address}\n")
    print(f"serving {server.selected.key} at {server.address}", flush=True)
    waits = [asyncio.create_task(stop_requested.wait()), asyncio.create_task(server.wait_unreachable())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    unreachable = not stop_requested.is_set()
    await server.close(0.0 if unreachable else None)
    if unreachable:
        raise PeerLost("the connection thread of the env server failed")


def _get_source_flag(args: Sequence[str]) -> str | None:
    """Return the value of --source; None if it is not given."""
    for arg, following in zip(args, [*args[1:], ""]):
        if arg == "--source" or arg.startswith("--source="):
            return arg.partition("=")[2] or following
    return None
