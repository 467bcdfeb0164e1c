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

from ramify.wire.link import Frames

PARTING = 0.5  # seconds for the other side to hear a goodbye
BATCH = 256  # messages taken before anything else has its turn
LINGER = 2000  # milliseconds for the last words

Event = tuple[Any, ...]


class End(Protocol):
    """One end of connections; used by one thread at a time."""

    events: list[Event]
    """What the loop has to hear."""

    def come(self, frames: Sequence[zmq.Frame], now: float) -> None:
        """A message has come."""
        ...

    def told(self, command: Event, now: float) -> None:
        """The loop wants something."""
        ...

    def tick(self, now: float) -> float:
        """Do what is due; returns the seconds until something is again."""
        ...

    def end(self) -> None:
        """Say the last words."""
        ...

    @property
    def parted(self) -> bool:
        """Whether everybody has heard them."""
        ...


class Pump:
    """Runs an `End` over a socket until it is stopped."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", end: End, deliver: Callable[[Sequence[Event]], None], name: str
    ) -> None:
        self._socket, self._end, self._deliver = socket, end, deliver
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Event] = deque()
        self._lock = threading.Lock()  # around the end and its socket
        self._due = False  # whether the loop is about to turn
        self._stopping, self._broken = threading.Event(), False
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"wire {name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop.add_reader(self._socket.fileno(), self._turn_here)
        self._thread.start()

    def post(self, *command: Any) -> None:
        """Hand something to the end; from the loop."""
        self._commands.append(command)
        self._turn_soon()

    async def stop(self) -> None:
        """Say goodbye and close the socket."""
        if not self._stopping.is_set():
            self._loop.remove_reader(self._socket.fileno())
            self._stopping.set()
        await self._done.wait()  # the thread waits for nothing that has no end
        self._thread.join()

    # -- in the loop ---------------------------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn_here)

    def _turn_here(self) -> None:
        self._due = False
        with self._lock:
            if not self._stopping.is_set() and self._turn() == 0.0:
                self._turn_soon()
            events, self._end.events = self._end.events, []
        if events:
            self._deliver(events)

    def _close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(LINGER)
        self._done.set()

    # -- in the loop or in the thread, one at a time -------------------------------------------------------------------

    def _turn(self) -> float:
        """Say what is to be said, hear what has come, do what is due; returns the seconds until the next turn."""
        now = time.monotonic()
        try:
            while self._commands:
                self._end.told(self._commands.popleft(), now)
            self._take(now)
            wait = self._end.tick(now)
            more = int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN  # asked, for the sign of it may be used up
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._end.events.append(("broken", error))
            self._broken = True
            self._stopping.set()
            return 0.0
        return 0.0 if more else wait

    def _take(self, now: float) -> None:
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._end.come(frames, now)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            wait = 0.0
            while not self._stopping.wait(wait):
                wait = self._turn_there()
            self._turn_there()
            if not self._broken:
                self._part()
        finally:
            self._tell(self._close)

    def _turn_there(self) -> float:
        with self._lock:
            wait = self._turn() if not self._broken else 0.0
            heard = bool(self._end.events)
        if heard:
            self._tell(self._turn_here)
        return wait

    def _part(self) -> None:
        """Say goodbye, and wait until it was heard: a socket that is closed takes back what nobody has read yet."""
        self._end.end()
        end = time.monotonic() + PARTING
        while not self._end.parted and (left := end - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                self._take(time.monotonic())

    def _tell(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)


def sender(socket: "zmq.Socket[bytes]") -> Callable[[Frames], bool]:
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
