"""`ramify env-server @ config.toml --source train/NAME`: serve one source with worker processes."""

import asyncio
import contextlib
import signal
import sys

from ramify.cli.arguments import ConfigCall
from ramify.core.errors import PeerLost
from ramify.core.files import write_atomically
from ramify.core.hub import print_to_stderr
from ramify.env.data_selection import fetch_dataset_of
from ramify.processes.wire.address import check_bind_address
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.server import EnvServer


def run(call: ConfigCall[EnvServerConfig]) -> int:
    """Serve until SIGTERM or SIGINT."""
    config = call.config
    selected = config.select_source()
    if call.flags.dry_run:
        check_bind_address(selected.listen_address, config.load_secret())
        address = selected.listen_address if selected.config.address else "a free port of this machine"
        log_path = selected.log_path(config.output)
        print(f"would serve {selected.key} at {address}, {selected.config.pool}, log in {log_path}")
        return 0
    fetch_dataset_of(selected.config.taskset, print_to_stderr)
    asyncio.run(serve(config))
    return 0


async def serve(config: EnvServerConfig) -> None:
    """Serve until SIGTERM or SIGINT; then let attempts finish within the grace period."""
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
