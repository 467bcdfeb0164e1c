"""A client of one server. Calls have timeouts; they survive a reconnect, but not a restart of the server."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

import zmq

from ramify.core.async_calls import AsyncService, wait_for_event
from ramify.core.errors import DeadlineExceeded, PeerLost, QueueFull, RamifyError, RequestInvalid
from ramify.processes.wire.client_protocol import ClientProtocol
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import (
    MAX_BODY_FRAMES,
    CancelHeader,
    HeartbeatHeader,
    RequestHeader,
    WireMessage,
    WireSettings,
)
from ramify.processes.wire.socket_driver import SocketDriver, open_socket
from ramify.processes.wire.socket_protocol import ProtocolEvent

OnPart = Callable[[WireMessage], None]
DEADLINE_GRACE = 2.0  # seconds after the deadline of a call in which the server may still send its failure


@dataclass(slots=True)
class PendingCall:
    """A request that waits for its response. `session_number` is the session it was sent in."""

    session_number: int
    response: "asyncio.Future[WireMessage]"
    on_part: OnPart | None


class WireClient(AsyncService):
    """Call the methods of one server from one event loop, between `start` and `close`, or in `async with`.

    With a `secret`, the connection is encrypted unless `encrypted` is False. Pass a `loop_monitor` to share one between
    several clients and servers of an event loop.
    """

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
        self._request_ids = count(1)
        self._session_number = 0
        self._handshake_done = asyncio.Event()
        self._rejection: RamifyError | None = None
        self._closed = False

    async def start(self, timeout: float | None = None) -> Self:
        """Connect to the server, which may still be starting.

        Raises PeerLost if it does not answer within `timeout` seconds (default: `settings.server_timeout`).
        """
        curve_secret = self._secret if self._encrypted else None
        socket = open_socket(zmq.DEALER, self.address, curve_secret, self.settings, self.settings.server_timeout)
        socket.immediate = True
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 1000
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise PeerLost(f"{self.address} is not a valid address: {error.strerror}") from error
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
        """Fail all pending calls, which the server then cancels, and disconnect."""
        if self._closed:
            return
        self._closed = True
        self._fail_calls(PeerLost(f"this client has closed the connection to {self.address}"))
        await self._driver.stop()
        if self._owns_loop_monitor and self._loop_monitor is not None:
            self._loop_monitor.stop()

    def fail_pending(self, reason: str) -> None:
        """Fail all pending calls with PeerLost, because the caller knows that the server is gone."""
        self._fail_calls(PeerLost(reason))

    # -- status --------------------------------------------------------------------------------------------------------

    @property
    def last_heartbeat(self) -> HeartbeatHeader:
        """The last heartbeat of the server, with the lag of its event loop."""
        return self._protocol.last_heartbeat

    @property
    def seconds_since_received(self) -> float:
        """Seconds since the last message from the server; 0 before the first."""
        last = self._protocol.last_received_time
        return max(0.0, time.monotonic() - last) if last else 0.0

    @property
    def session_number(self) -> int:
        """The number of sessions that the server has lost, each with all its requests."""
        return self._session_number

    @property
    def num_pending(self) -> int:
        """The number of calls that wait for their response."""
        return len(self._pending)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, message: WireMessage | None = None, *, timeout: float, on_part: OnPart | None = None
    ) -> WireMessage:
        """Send a request and return the reply, or raise the failure that the server sent instead.

        `on_part` is called with each streamed part. Cancelling this coroutine cancels the request in the server. Raises
        DeadlineExceeded after `timeout` seconds, PeerLost, QueueFull or RequestInvalid.
        """
        deadline = time.monotonic() + timeout
        message = message or WireMessage.encode()
        if len(self._pending) >= self.settings.max_open_requests:
            raise QueueFull(f"{len(self._pending)} requests to {self.address} are already open")
        if not self._handshake_done.is_set() or self._rejection is not None or self._closed:
            await self._wait_connected(min(timeout, self.settings.server_timeout))
        if len(message.frames) > MAX_BODY_FRAMES:
            raise RequestInvalid(
                f"{method}: the message has {len(message.frames)} frames, at most {MAX_BODY_FRAMES} are allowed"
            )
        if max(map(len, message.frames), default=0) > self._protocol.max_frame_bytes:
            raise RequestInvalid(
                f"{method}: a frame is larger than the {self._protocol.max_frame_bytes} bytes that the server accepts"
            )
        request_id, response = next(self._request_ids), asyncio.get_running_loop().create_future()
        self._pending[request_id] = PendingCall(self._session_number, response, on_part)
        remaining = deadline - time.monotonic()
        self._driver.submit(self._session_number, RequestHeader(0, 0, request_id, method, remaining), message.frames)
        try:
            async with asyncio.timeout(remaining + DEADLINE_GRACE):
                return await response
        except TimeoutError as error:
            self._send_cancel(request_id)
            raise DeadlineExceeded(f"waited {timeout:g} s for {method} of {self.address}") from error
        except asyncio.CancelledError:
            self._send_cancel(request_id)
            raise
        finally:
            del self._pending[request_id]
            if response.done() and not response.cancelled():
                response.exception()  # mark it as retrieved, so that asyncio does not warn about it

    def _send_cancel(self, request_id: int) -> None:
        if (call := self._pending.get(request_id)) is not None and not self._closed:
            self._driver.submit(call.session_number, CancelHeader(0, 0, request_id), ())

    async def _wait_connected(self, timeout: float) -> None:
        if self._closed:
            raise PeerLost(f"the connection to {self.address} is closed")
        is_answered = await wait_for_event(self._handshake_done, timeout)
        if self._rejection is not None:
            raise self._rejection
        if not is_answered:
            hint = "; check the secret" if self._secret else ""
            raise PeerLost(f"no answer from {self.address} for {timeout:g} s{hint}")

    def _handle_events(self, events: Sequence[ProtocolEvent]) -> None:
        for event in events:
            match event:
                case ("part", request_id, message):
                    self._handle_part(request_id, message)
                case ("reply", request_id, message):
                    if (call := self._get_unfinished(request_id)) is not None:
                        call.response.set_result(message)
                case ("failure", request_id, failure):
                    if (call := self._get_unfinished(request_id)) is not None:
                        call.response.set_exception(failure.to_exception())
                case ("connected",):
                    self._handshake_done.set()
                case ("lost", reason):
                    self._handshake_done.clear()
                    for request_id in list(self._pending):
                        self._send_cancel(request_id)
                    self._fail_calls(PeerLost(f"{self.address} is lost: {reason}"))
                case ("session_reset", session_number):
                    self._session_number = session_number
                    reason = "it was restarted, or received nothing from this client for too long"
                    self._fail_calls(PeerLost(f"{self.address} has forgotten the request: {reason}"), session_number)
                case ("rejected", failure):
                    self._reject(failure.to_exception())
                case ("failed", error):
                    self._reject(PeerLost(f"the connection to {self.address} failed: {error!r}"))
                    raise error
                case _:
                    raise AssertionError(event)

    def _get_unfinished(self, request_id: int) -> PendingCall | None:
        call = self._pending.get(request_id)
        return call if call is not None and not call.response.done() else None

    def _handle_part(self, request_id: int, message: WireMessage) -> None:
        call = self._get_unfinished(request_id)
        if call is None or call.on_part is None:
            return
        try:
            call.on_part(message)
        except Exception as error:  # noqa: BLE001 - the caller's callback may raise anything; the caller gets it
            self._send_cancel(request_id)
            call.response.set_exception(error)

    def _reject(self, error: RamifyError) -> None:
        """Fail all calls, now and in the future."""
        self._rejection = error
        self._handshake_done.set()
        self._fail_calls(error)

    def _fail_calls(self, error: RamifyError, before_session: int | None = None) -> None:
        for call in self._pending.values():
            if not call.response.done() and (before_session is None or call.session_number < before_session):
                call.response.set_exception(type(error)(error.message))
