"""The thread that owns a socket.

A ZMQ socket belongs to one thread, and heartbeats must not depend on an event loop that user code may block. So the
socket, the numbered streams and the clock of a connection live here, in an `End`; the event loop gets finished events
in batches, and hands over what it wants to say.
"""

import asyncio
import contextlib
import socket as sockets
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
    """One end of connections. Everything but `deliver` runs in the pump's thread."""

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
        self._wake, self._woken = sockets.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._awake = False  # whether a wake-up is under way
        self._stopping = False
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"wire {name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(self, *command: Any) -> None:
        """Hand something to the end; from the loop."""
        self._commands.append(command)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    async def stop(self) -> None:
        """Say goodbye and close the socket."""
        if not self._thread.is_alive():
            return
        self._stopping = True
        self.post()
        await self._done.wait()  # the thread waits for nothing that has no end
        self._thread.join()

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
            self._part()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._hand([("broken", error)])
        finally:
            self._socket.close(LINGER)
            self._wake.close()
            self._woken.close()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done.set)

    def _turn_until_stopped(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        wait = 0.0
        while True:
            found = dict(poller.poll(int(wait * 1000)))
            now = time.monotonic()
            if self._woken.fileno() in found:
                self._awake = False
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            stopping = self._stopping
            while self._commands:
                if command := self._commands.popleft():
                    self._end.told(command, now)
            more = self._socket in found and self._take(now)
            wait = 0.0 if more else self._end.tick(now)
            if self._end.events:
                events, self._end.events = self._end.events, []
                self._hand(events)
            if stopping:
                return

    def _part(self) -> None:
        """Say goodbye, and wait until it was heard: a socket that is closed takes back what nobody has read yet."""
        self._end.end()
        end = time.monotonic() + PARTING
        while not self._end.parted and (left := end - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                self._take(time.monotonic())

    def _take(self, now: float) -> bool:
        """Take what has come; whether there may be more."""
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._end.come(frames, now)
        return True

    def _hand(self, events: Sequence[Event]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._deliver, events)


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
