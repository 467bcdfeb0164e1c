"""Connects to a running Ray cluster, within deadlines.

`ray.init` itself waits without end for an address at which nobody answers, in native code, which delays Ctrl-C too. So
the address is tried first with a TCP connection, and `ray.init` runs in a thread that can be left behind.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from ramify.core.async_calls import call_in_daemon_thread
from ramify.core.errors import ConfigInvalid
from ramify.core.interactive import run_coroutine
from ramify.core.log_filters import hide_log_records

ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray uses its value for the address `auto`
TCP_TIMEOUT = 5.0  # seconds to open a TCP connection
INIT_TIMEOUT = 60.0  # seconds for all of it; Ray needs a few if the machine is not busy
# Ray says so because it is not in the main thread. The supervisor handles the signal.
SIGTERM_WARNING = "SIGTERM handler is not set"


def connect_to_ray(address: str, *, timeout: float = INIT_TIMEOUT) -> Any:
    """Return the module `ray`, connected to the cluster at `address`: `auto`, HOST:PORT or ray://HOST:PORT.

    Raises ConfigInvalid if Ray is missing or the cluster does not answer within `timeout` seconds.
    """
    try:
        ray: Any = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigInvalid("'ray' needs the extra `ray`: pip install 'ramify[ray]'", key="cluster.launcher") from error
    variable = os.environ.get(ADDRESS_VARIABLE, "") if address == "auto" else ""

    def initialize() -> None:
        _check_listening(variable or address)
        with hide_log_records("ray._private.worker", SIGTERM_WARNING):
            ray.init(address=address, namespace="ramify", log_to_driver=False, logging_level="warning")

    try:
        run_coroutine(_run_with_deadline(initialize, timeout))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = f"{variable!r} ({ADDRESS_VARIABLE})" if variable else repr(address)
        reason = str(error) or f"no answer within {timeout:g} s"
        advice = "start it with `ray start --head`, or set cluster.address"
        raise ConfigInvalid(f"no Ray cluster answers at {where}: {reason}; {advice}", key="cluster.address") from error
    return ray


async def _run_with_deadline(initialize: Callable[[], None], timeout: float) -> None:
    async with asyncio.timeout(timeout):
        await call_in_daemon_thread(initialize, "ray.init")


def _check_listening(address: str) -> None:
    """Raise OSError if nobody listens at HOST:PORT; an address of another form is left to Ray."""
    try:
        parts = urlsplit(f"//{address.removeprefix('ray://')}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return
    if host and port:
        socket.create_connection((host, port), timeout=TCP_TIMEOUT).close()
