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
from ramify.wire.address import enable_curve
from ramify.wire.client_protocol import ClientProtocol, ConnectionState
from ramify.wire.headers import MAX_BODY_FRAMES, CancelHeader, HeartbeatHeader, RequestHeader
from ramify.wire.loop_monitor import LoopMonitor
from ramify.wire.message import WireMessage
from ramify.wire.settings import WireSettings
from ramify.wire.socket_driver import ProtocolEvent, SocketDriver

OnPart = Callable[[WireMessage], None]
DEADLINE_GRACE = 2.0  # seconds after its deadline in which a server may still say why it has no answer


@dataclass(slots=True)
class PendingCall:
    """A request that waits for its answer."""

    session_number: int
    response: "asyncio.Future[WireMessage]"
    on_part: OnPart | None


class WireClient:
    """One server, called from one event loop; `start` and `close` (or `async with`) are its life."""

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        encrypted: bool = True,
        settings: WireSettings | None = None,
        loop_monitor: LoopMonitor | None = None,
    ) -> None:
        self.address, self.settings = address, settings or WireSettings()
        self._secret, self._encrypted = secret, encrypted
        self._loop_monitor, self._owns_loop_monitor = loop_monitor, loop_monitor is None
        self._pending: dict[int, PendingCall] = {}
        self._ids = count(1)
        self._session_number = 0
        self._handshake_done = asyncio.Event()
        self._rejection: RamifyError | None = None
        self._closed = False

    async def start(self, timeout: float | None = None) -> Self:
        """Meet the server, which may come up meanwhile; PeerLost if it does not answer in time."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.immediate = True
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 1000
        socket.sndhwm = socket.rcvhwm = 10_000
        socket.heartbeat_ivl = int(self.settings.heartbeat_interval * 2000)
        socket.heartbeat_timeout = int(self.settings.server_timeout * 1000)
        try:
            if self._secret and self._encrypted:
                enable_curve(socket, self._secret, server=False)
            socket.ipv6 = "[" in self.address
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise PeerLost(f"{self.address} is no address: {error.strerror}") from error
        self._loop_monitor = self._loop_monitor or LoopMonitor()
        self._protocol = ClientProtocol(socket, self._secret, self.settings, self._loop_monitor)
        self._driver = SocketDriver(socket, self._protocol, self._handle_events, f"to {self.address}")
        self._driver.start()
        try:
            await self._wait_connected(self.settings.server_timeout if timeout is None else timeout)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Take back what is open and go; the server cancels it."""
        if self._closed:
            return
        self._closed = True
        self._fail_calls(PeerLost(f"the connection to {self.address} was closed here"))
        await self._driver.stop()
        if self._owns_loop_monitor and self._loop_monitor is not None:
            self._loop_monitor.stop()

    def fail_pending(self, reason: str) -> None:
        """Give up all that is open: whoever calls this knows that the server is gone."""
        self._fail_calls(PeerLost(reason))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- what is known of the server -----------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._protocol.state is ConnectionState.CONNECTED

    @property
    def last_heartbeat(self) -> HeartbeatHeader:
        """The server's last heartbeat."""
        return self._protocol.last_heartbeat

    @property
    def seconds_since_received(self) -> float:
        """Seconds since the server was heard."""
        return (
            max(0.0, time.monotonic() - self._protocol.last_received_time) if self._protocol.last_received_time else 0.0
        )

    @property
    def num_pending(self) -> int:
        """Requests that wait for their answer."""
        return len(self._pending)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, message: WireMessage | None = None, *, timeout: float, on_part: OnPart | None = None
    ) -> WireMessage:
        """Ask, and return the answer, or raise the failure that came instead.

        `on_part` gets the pieces of a streamed answer as they come. Whoever cancels this takes the request back.
        """
        end = time.monotonic() + timeout
        message = message or WireMessage.encode()
        if len(self._pending) >= self.settings.max_open_requests:
            raise QueueFull(f"{len(self._pending)} requests to {self.address} are open already")
        if not self._handshake_done.is_set() or self._rejection is not None or self._closed:
            await self._wait_connected(min(timeout, self.settings.server_timeout))
        if len(message.frames) > MAX_BODY_FRAMES:
            raise RequestInvalid(
                f"{method}: {len(message.frames)} frames, {MAX_BODY_FRAMES} are the most that one takes"
            )
        if max(map(len, message.frames), default=0) > self._protocol.max_frame_bytes:
            raise RequestInvalid(
                f"{method}: a frame is larger than the {self._protocol.max_frame_bytes} bytes the server takes"
            )
        id, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._pending[id] = PendingCall(self._session_number, future, on_part)
        left = end - time.monotonic()
        self._driver.submit(self._session_number, RequestHeader(0, 0, id, method, left), message.frames)
        try:
            async with asyncio.timeout(left + DEADLINE_GRACE):
                return await future
        except TimeoutError as error:
            self._send_cancel(id)
            raise DeadlineExceeded(f"waited {timeout:g} s for {method} of {self.address}") from error
        except asyncio.CancelledError:
            self._send_cancel(id)
            raise
        finally:
            del self._pending[id]
            if future.done() and not future.cancelled():
                future.exception()  # seen, even if the caller has turned away

    def _send_cancel(self, id: int) -> None:
        if (entry := self._pending.get(id)) is not None and not self._closed:
            self._driver.submit(entry.session_number, CancelHeader(0, 0, id), ())

    async def _wait_connected(self, timeout: float) -> None:
        if self._closed:
            raise PeerLost(f"the connection to {self.address} is closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._handshake_done.wait()
        if self._rejection is not None:
            raise self._rejection
        if not self._handshake_done.is_set():
            hint = "; is the secret right?" if self._secret else ""
            raise PeerLost(f"nobody answered at {self.address} for {timeout:g} s{hint}")

    def _handle_events(self, events: Sequence[ProtocolEvent]) -> None:
        for event in events:
            match event:
                case ("part", id, message):
                    self._handle_part(id, message)
                case ("reply", id, message):
                    if (entry := self._pending.get(id)) is not None and not entry.response.done():
                        entry.response.set_result(message)
                case ("fail", id, failure):
                    if (entry := self._pending.get(id)) is not None and not entry.response.done():
                        entry.response.set_exception(_to_exception(failure))
                case ("met",):
                    self._handshake_done.set()
                case ("lost", why):
                    self._handshake_done.clear()
                    for id in list(self._pending):
                        self._send_cancel(id)
                    self._fail_calls(PeerLost(f"{self.address} is lost: {why}"))
                case ("forgotten", epoch):
                    self._session_number = epoch
                    why = "it was started again, or did not hear us for too long"
                    self._fail_calls(PeerLost(f"{self.address} has forgotten the request: {why}"), epoch)
                case ("refused", failure):
                    self._rejection = _to_exception(failure)
                    self._handshake_done.set()
                    self._fail_calls(self._rejection)
                case ("broken", error):
                    self._rejection = PeerLost(f"the connection to {self.address} broke: {error!r}")
                    self._handshake_done.set()
                    self._fail_calls(self._rejection)
                    raise error
                case _:
                    raise AssertionError(event)

    def _handle_part(self, id: int, message: WireMessage) -> None:
        entry = self._pending.get(id)
        if entry is None or entry.on_part is None or entry.response.done():
            return
        try:
            entry.on_part(message)
        except Exception as error:  # noqa: BLE001 - what the caller's own code raises is the caller's to hear
            self._send_cancel(id)
            entry.response.set_exception(error)

    def _fail_calls(self, error: RamifyError, before_session: int | None = None) -> None:
        for entry in self._pending.values():
            if not entry.response.done() and (before_session is None or entry.session_number < before_session):
                entry.response.set_exception(type(error)(error.message))


def _to_exception(failure: Failure) -> RamifyError:
    error = failure.to_exception()
    return error if isinstance(error, RamifyError) else PeerRefused(failure.message)
