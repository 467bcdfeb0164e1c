"""What keeps a connection going, from the event loop and from a thread beside it.

A message should wait for no other thread, and a heartbeat for no event loop, which user code may block. So both may
turn the socket, the numbered streams and the clock of a connection, an `End`, one at a time: the loop whenever
something has come or is to be said, the thread whenever the clock asks for it. What has to be heard is heard in the
loop alone, in the order in which it came.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from ramify.wire.sequenced_stream import Frames

GOODBYE_TIMEOUT = 0.5  # seconds for the other side to hear a goodbye
MAX_MESSAGES_PER_RUN = 256  # messages taken before anything else has its turn
LINGER_MS = 2000  # milliseconds for the last words

ProtocolEvent = tuple[Any, ...]


class SocketProtocol(Protocol):
    """One end of connections; used by one thread at a time."""

    events: list[ProtocolEvent]
    """What the loop has to hear."""

    def message_received(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """A message has come."""
        ...

    def handle_command(self, command: ProtocolEvent, now: float) -> None:
        """The loop wants something."""
        ...

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is again."""
        ...

    def send_goodbye(self) -> None:
        """Say the last words."""
        ...

    @property
    def goodbye_done(self) -> bool:
        """Whether everybody has heard them."""
        ...


class SocketDriver:
    """Runs an `End` over a socket until it is stopped."""

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
        self._lock = threading.Lock()  # around the end and its socket
        self._is_scheduled = False  # whether the loop is about to turn
        self._stopping, self._failed = threading.Event(), False
        self._socket_closed = asyncio.Event()
        self._thread = threading.Thread(target=self._thread_main, name=f"wire {name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop.add_reader(self._socket.fileno(), self._run_in_loop)
        self._thread.start()

    def submit(self, *command: Any) -> None:
        """Hand something to the end; from the loop."""
        self._commands.append(command)
        self._schedule()

    async def stop(self) -> None:
        """Say goodbye and close the socket."""
        if not self._stopping.is_set():
            self._loop.remove_reader(self._socket.fileno())
            self._stopping.set()
        await self._socket_closed.wait()  # the thread waits for nothing that has no end
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
        """Say what is to be said, hear what has come, do what is due; returns the seconds until the next turn."""
        now = time.monotonic()
        try:
            while self._commands:
                self._protocol.handle_command(self._commands.popleft(), now)
            self._receive(now)
            wait = self._protocol.tick(now)
            more = int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN  # asked, for the sign of it may be used up
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._protocol.events.append(("broken", error))
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
            heard = bool(self._protocol.events)
        if heard:
            self._call_in_loop(self._run_in_loop)
        return wait

    def _send_goodbye_and_wait(self) -> None:
        """Say goodbye, and wait until it was heard: a socket that is closed takes back what nobody has read yet."""
        self._protocol.send_goodbye()
        end = time.monotonic() + GOODBYE_TIMEOUT
        while not self._protocol.goodbye_done and (left := end - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                self._receive(time.monotonic())

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)


def make_sender(socket: "zmq.Socket[bytes]") -> Callable[[Frames], bool]:
    """Sends a message if there is somebody to take it."""

    def send(frames: Frames) -> bool:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    return send
