"""Runs a protocol over a socket, from the event loop and from a thread beside it.

Messages must not wait for a thread switch, and heartbeats must not wait for an event loop that user code may block. So
the loop and a thread both run the protocol, under one lock: the loop when data arrives or is sent, the thread when a
timer is due. Events are delivered only in the loop, in order.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq

from ramify.processes.wire.address import enable_curve
from ramify.processes.wire.message import WireSettings
from ramify.processes.wire.socket_protocol import ProtocolEvent, SocketProtocol

GOODBYE_TIMEOUT = 0.5  # seconds for the peer to answer a goodbye
MAX_MESSAGES_PER_RUN = 256  # received before timers and the event loop get their turn
LINGER_MS = 2000  # for messages that are still queued when the socket is closed


def open_socket(
    kind: int, address: str, secret: str | None, settings: WireSettings, peer_timeout: float
) -> "zmq.Socket[bytes]":
    """Return a socket for an address, encrypted if there is a secret.

    `kind` is `zmq.ROUTER` for a server, `zmq.DEALER` for a client. ZMQ drops a connection that is silent, or not open
    yet, for `peer_timeout` seconds.
    """
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = 10_000
    socket.heartbeat_ivl = int(settings.heartbeat_interval * 2000)
    # A network may drop the first packets of a connection; the system and ZMQ would wait for them for a minute or two.
    socket.heartbeat_timeout = socket.connect_timeout = socket.handshake_ivl = int(peer_timeout * 1000)
    socket.ipv6 = "[" in address
    if secret:
        enable_curve(socket, secret, server=kind == zmq.ROUTER)
    return socket


class SocketDriver:
    """Runs a `SocketProtocol` over a socket until it is stopped."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        protocol: SocketProtocol,
        handle_events: Callable[[Sequence[ProtocolEvent]], None],
        name: str,
    ) -> None:
        self._socket, self._protocol, self._handle_events = socket, protocol, handle_events
        self._loop = asyncio.get_running_loop()
        self._commands: deque[ProtocolEvent] = deque()
        self._lock = threading.Lock()  # guards the protocol and the socket
        self._is_scheduled = False  # whether `_run_in_loop` is queued in the loop
        self._stopping, self._failed = threading.Event(), False
        self._socket_closed = asyncio.Event()
        self._thread = threading.Thread(target=self._thread_main, name=f"wire {name}", daemon=True)

    def start(self) -> None:
        """Start the thread and watch the socket."""
        self._loop.add_reader(self._socket.fileno(), self._run_in_loop)
        self._thread.start()

    def submit(self, *command: Any) -> None:
        """Queue a command for the protocol. Call it from the loop."""
        self._commands.append(command)
        self._schedule()

    async def stop(self) -> None:
        """Say goodbye and close the socket."""
        if not self._stopping.is_set():
            self._loop.remove_reader(self._socket.fileno())
            self._stopping.set()
        await self._socket_closed.wait()  # every wait of the thread is bounded
        self._thread.join()

    # -- in the loop ---------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run_in_loop)

    def _run_in_loop(self) -> None:
        self._is_scheduled = False
        with self._lock:
            if not self._stopping.is_set() and self._run_once() == 0.0:
                self._schedule()
            events, self._protocol.events = self._protocol.events, []
        if events:
            self._handle_events(events)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(LINGER_MS)
        self._socket_closed.set()

    # -- in the loop or in the thread, one at a time -------------------------------------------------------------------

    def _run_once(self) -> float:
        """Handle commands, received messages and timers; return the seconds until the next run."""
        now = time.monotonic()
        try:
            while self._commands:
                self._protocol.handle_command(self._commands.popleft(), now)
            self._receive(now)
            wait = self._protocol.tick(now)
            more = int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN  # the socket signals only new events: look
        except Exception as error:  # noqa: BLE001 - pending calls must fail, whatever the error is
            self._protocol.events.append(("failed", error))
            self._failed = True
            self._stopping.set()
            return 0.0
        return 0.0 if more else wait

    def _receive(self, now: float) -> None:
        for _ in range(MAX_MESSAGES_PER_RUN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._protocol.message_received(frames, now)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _thread_main(self) -> None:
        try:
            wait = 0.0
            while not self._stopping.wait(wait):
                wait = self._run_in_thread()
            self._run_in_thread()
            if not self._failed:
                self._send_goodbye_and_wait()
        finally:
            self._call_in_loop(self._close)

    def _run_in_thread(self) -> float:
        with self._lock:
            wait = self._run_once() if not self._failed else 0.0
            has_events = bool(self._protocol.events)
        if has_events:
            self._call_in_loop(self._run_in_loop)
        return wait

    def _send_goodbye_and_wait(self) -> None:
        """Send goodbye and wait for the answers: closing the socket drops messages that the peer has not read."""
        self._protocol.send_goodbye()
        deadline = time.monotonic() + GOODBYE_TIMEOUT
        while not self._protocol.goodbye_done and (remaining := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(remaining * 1000) + 1):
                self._receive(time.monotonic())

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)
