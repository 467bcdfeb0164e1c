"""Serves the page: in the event loop of a command, or in a thread beside a run."""

import asyncio
import contextlib
import threading
import webbrowser
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from pathlib import Path

from ramify.core.errors import DeadlineExceeded
from ramify.processes.wire.http_server import HttpServer
from ramify.view.queries import RunQueries
from ramify.view.server import build_app, is_loopback, make_token

START_TIMEOUT = 20.0  # seconds, for the thread
STOP_TIMEOUT = 10.0


async def serve_page(
    folder: Path,
    stop: asyncio.Event,
    on_address: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve the runs in a folder until `stop` is set; `on_address` gets the address, with the token if one is needed.

    `allowed_hosts` are the names under which proxies serve the page.

    Raises PortTaken if the port is in use, and ConfigInvalid if this machine does not have the address.
    """
    token = None if is_loopback(host) and not allowed_hosts else make_token()
    with contextlib.closing(RunQueries(folder)) as queries:
        app = build_app(queries, token=token, hosts=tuple(allowed_hosts))
        async with HttpServer(app, host, port, name="--port") as server:
            on_address(server.address + (f"/?token={token}" if token else ""))
            await stop.wait()


@contextlib.contextmanager
def serve_in_thread(folder: Path) -> Generator[str]:
    """Serve the runs in a folder at a free port of the loopback address while the block runs; yield the address.

    Raises DeadlineExceeded if the server does not start in time; it then stops as soon as it has started.
    """
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def announce(address: str) -> None:
            try:
                started.set_result((address, loop, stop))
            except InvalidStateError:  # cancelled: nobody waits for the page any more
                stop.set()

        await serve_page(folder, stop, announce)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="view", daemon=True)
    thread.start()
    wait({started}, START_TIMEOUT)
    if started.cancel():
        raise DeadlineExceeded(f"waited {START_TIMEOUT:g} s for the page of {folder} to be served")
    address, loop, stop = started.result()
    try:
        yield address
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended already
            loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_TIMEOUT)


def open_browser(address: str) -> None:
    """Open the address in a browser, without waiting for it."""
    threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
