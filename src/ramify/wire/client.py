"""A client: calls with deadlines, to one server, that survive a connection but not a server that forgot them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

import zmq

from ramify.errors import DeadlineExceeded, Failure, PeerLost, PeerRefused, QueueFull, RamifyError, RequestInvalid
from ramify.wire.address import encrypt
from ramify.wire.client_end import ClientEnd, State
from ramify.wire.frames import MAX_BODY, Beat, Cancel, Request
from ramify.wire.message import Message
from ramify.wire.pulse import Pulse
from ramify.wire.pump import Event, Pump
from ramify.wire.settings import Settings

OnPart = Callable[[Message], None]
ALLOWANCE = 2.0  # seconds after its deadline in which a server may still say why it has no answer


@dataclass(slots=True)
class Open:
    """A request that waits for its answer."""

    epoch: int
    answer: "asyncio.Future[Message]"
    on_part: OnPart | None


class Client:
    """One server, called from one event loop; `start` and `close` (or `async with`) are its life."""

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        encrypted: bool = True,
        settings: Settings | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.address, self.settings = address, settings or Settings()
        self._secret, self._encrypted = secret, encrypted
        self._pulse, self._own_pulse = pulse, pulse is None
        self._open: dict[int, Open] = {}
        self._ids = count(1)
        self._epoch = 0
        self._met = asyncio.Event()
        self._refused: RamifyError | None = None
        self._closed = False

    async def start(self, deadline: float | None = None) -> Self:
        """Meet the server, which may come up meanwhile; PeerLost if it does not answer in time."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.immediate = True
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 1000
        socket.sndhwm = socket.rcvhwm = 10_000
        socket.heartbeat_ivl = int(self.settings.interval * 2000)
        socket.heartbeat_timeout = int(self.settings.patience * 1000)
        try:
            if self._secret and self._encrypted:
                encrypt(socket, self._secret, server=False)
            socket.ipv6 = "[" in self.address
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise PeerLost(f"{self.address} is no address: {error.strerror}") from error
        self._pulse = self._pulse or Pulse()
        self._end = ClientEnd(socket, self._secret, self.settings, self._pulse)
        self._pump = Pump(socket, self._end, self._deliver, f"to {self.address}")
        self._pump.start()
        try:
            await self._meet(self.settings.patience if deadline is None else deadline)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Take back what is open and go; the server cancels it."""
        if self._closed:
            return
        self._closed = True
        self._fail(PeerLost(f"the connection to {self.address} was closed here"))
        await self._pump.stop()
        if self._own_pulse and self._pulse is not None:
            self._pulse.stop()

    def abandon(self, why: str) -> None:
        """Give up all that is open: whoever calls this knows that the server is gone."""
        self._fail(PeerLost(why))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- what is known of the server -----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._end.state is State.MET

    @property
    def beat(self) -> Beat:
        """The server's last heartbeat."""
        return self._end.beat

    @property
    def silence(self) -> float:
        """Seconds since the server was heard."""
        return max(0.0, time.monotonic() - self._end.heard) if self._end.heard else 0.0

    @property
    def open(self) -> int:
        """Requests that wait for their answer."""
        return len(self._open)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, message: Message | None = None, *, deadline: float, on_part: OnPart | None = None
    ) -> Message:
        """Ask, and return the answer, or raise the failure that came instead.

        `on_part` gets the pieces of a streamed answer as they come. Whoever cancels this takes the request back.
        """
        end = time.monotonic() + deadline
        message = message or Message.of()
        if len(self._open) >= self.settings.queue:
            raise QueueFull(f"{len(self._open)} requests to {self.address} are open already")
        if not self._met.is_set() or self._refused is not None or self._closed:
            await self._meet(min(deadline, self.settings.patience))
        if len(message.frames) > MAX_BODY:
            raise RequestInvalid(f"{method}: {len(message.frames)} frames, {MAX_BODY} are the most that one takes")
        if max(map(len, message.frames), default=0) > self._end.max_frame:
            raise RequestInvalid(f"{method}: a frame is larger than the {self._end.max_frame} bytes the server takes")
        id, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._open[id] = Open(self._epoch, future, on_part)
        left = end - time.monotonic()
        self._pump.post(self._epoch, Request(0, 0, id, method, left), message.frames)
        try:
            async with asyncio.timeout(left + ALLOWANCE):
                return await future
        except TimeoutError as error:
            self._take_back(id)
            raise DeadlineExceeded(f"waited {deadline:g} s for {method} of {self.address}") from error
        except asyncio.CancelledError:
            self._take_back(id)
            raise
        finally:
            del self._open[id]
            if future.done() and not future.cancelled():
                future.exception()  # seen, even if the caller has turned away

    def _take_back(self, id: int) -> None:
        if (entry := self._open.get(id)) is not None and not self._closed:
            self._pump.post(entry.epoch, Cancel(0, 0, id), ())

    async def _meet(self, seconds: float) -> None:
        if self._closed:
            raise PeerLost(f"the connection to {self.address} is closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._met.wait()
        if self._refused is not None:
            raise self._refused
        if not self._met.is_set():
            hint = "; is the secret right?" if self._secret else ""
            raise PeerLost(f"nobody answered at {self.address} for {seconds:g} s{hint}")

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ("part", id, message):
                    self._part(id, message)
                case ("reply", id, message):
                    if (entry := self._open.get(id)) is not None and not entry.answer.done():
                        entry.answer.set_result(message)
                case ("fail", id, failure):
                    if (entry := self._open.get(id)) is not None and not entry.answer.done():
                        entry.answer.set_exception(_error(failure))
                case ("met",):
                    self._met.set()
                case ("lost", why):
                    self._met.clear()
                    for id in list(self._open):
                        self._take_back(id)
                    self._fail(PeerLost(f"{self.address} is lost: {why}"))
                case ("forgotten", epoch):
                    self._epoch = epoch
                    why = "it was started again, or did not hear us for too long"
                    self._fail(PeerLost(f"{self.address} has forgotten the request: {why}"), epoch)
                case ("refused", failure):
                    self._refused = _error(failure)
                    self._met.set()
                    self._fail(self._refused)
                case ("broken", error):
                    self._refused = PeerLost(f"the connection to {self.address} broke: {error!r}")
                    self._met.set()
                    self._fail(self._refused)
                    raise error
                case _:
                    raise AssertionError(event)

    def _part(self, id: int, message: Message) -> None:
        entry = self._open.get(id)
        if entry is None or entry.on_part is None or entry.answer.done():
            return
        try:
            entry.on_part(message)
        except Exception as error:  # noqa: BLE001 - what the caller's own code raises is the caller's to hear
            self._take_back(id)
            entry.answer.set_exception(error)

    def _fail(self, error: RamifyError, before: int | None = None) -> None:
        for entry in self._open.values():
            if not entry.answer.done() and (before is None or entry.epoch < before):
                entry.answer.set_exception(type(error)(error.message))


def _error(failure: Failure) -> RamifyError:
    error = failure.to_exception()
    return error if isinstance(error, RamifyError) else PeerRefused(failure.message)
