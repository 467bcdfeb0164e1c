"""A server: each request becomes a task of the event loop and gets exactly one reply or failure."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from typing import Self, TypeVar
from urllib.parse import urlsplit

import zmq

from ramify.core.async_calls import AsyncService, fail_after
from ramify.core.errors import (
    Failure,
    PeerLost,
    QueueFull,
    RamifyError,
    RequestCancelled,
    RequestInvalid,
)
from ramify.processes.wire.address import check_bind_address
from ramify.processes.wire.listener import is_reserved, open_listener, to_bind_error
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import (
    MAX_BODY_FRAMES,
    FailureHeader,
    PartHeader,
    ReplyHeader,
    RequestHeader,
    WireMessage,
    WireSettings,
    truncate_failure,
)
from ramify.processes.wire.server_protocol import ServerProtocol, WireSession
from ramify.processes.wire.socket_driver import SocketDriver, open_socket
from ramify.processes.wire.socket_protocol import ProtocolEvent

CLOSE_TIMEOUT = 30.0  # seconds that cancelled handlers have to end
MAX_TIMEOUT = 30 * 86400.0  # seconds; a longer timeout of a request is shortened to this

T = TypeVar("T")
RequestKey = tuple[WireSession, int]


class IncomingRequest:
    """A request that a handler has to answer: its `header`, its `message` and the `session` of the client."""

    def __init__(self, server: "WireServer", session: WireSession, header: RequestHeader, message: WireMessage) -> None:
        self.header, self.message, self.session = header, message, session
        self._server = server
        self._streaming = True

    @property
    def timeout(self) -> float:
        """Seconds that the handler has, counted from the arrival of the request."""
        return min(max(0.0, self.header.timeout), MAX_TIMEOUT)

    def decode(self, expected_type: type[T]) -> T:
        """Return the value of the message. Raises RequestInvalid if it is no `expected_type`."""
        return self.message.decode(expected_type)

    def send_part(self, message: WireMessage) -> None:
        """Stream one part of the reply. If the client is too slow, skip this part and all later ones."""
        if self._streaming and self.session.stream.unacked_bytes > self._server.settings.max_unacked_bytes // 4:
            self._streaming = False
        if self._streaming:
            self._server.driver.submit(self.session, PartHeader(0, 0, self.header.request_id), message.frames)


Handler = Callable[[IncomingRequest], Awaitable[WireMessage]]


class WireServer(AsyncService):
    """Serve `handlers` by method name between `start` and `close`, or in `async with`.

    A server with a `secret` encrypts its traffic; pass `encrypted=False` to disable that on a local address. `name`
    labels the server in error messages. After `start`, `address` holds the actual port.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        address: str = "tcp://127.0.0.1:0",
        *,
        secret: str | None = None,
        encrypted: bool = True,
        settings: WireSettings | None = None,
        loop_monitor: LoopMonitor | None = None,
        name: str = "server",
    ) -> None:
        check_bind_address(address, secret if encrypted else None)
        self.address, self.settings, self.loop_monitor = address, settings or WireSettings(), loop_monitor
        self._handlers, self._secret, self._encrypted, self._name = handlers, secret, encrypted, name
        self._tasks: dict[RequestKey, asyncio.Task[WireMessage]] = {}
        self._cancel_reasons: dict[RequestKey, RamifyError] = {}
        self._closing = False
        self.failed = asyncio.Event()
        """Set when the socket has failed; no request can be answered any more."""

    async def start(self) -> Self:
        """Listen and serve. Raises PortTaken if the port is in use, ConfigInvalid if the address is not usable."""
        curve_secret = self._secret if self._encrypted else None
        socket = open_socket(zmq.ROUTER, self.address, curve_secret, self.settings, self.settings.session_timeout)
        socket.router_mandatory = True
        socket.maxmsgsize = self.settings.max_frame_bytes
        try:
            url = urlsplit(self.address)
            if url.scheme == "tcp" and url.port and is_reserved(url.port):
                socket.setsockopt(zmq.USE_FD, open_listener(url.hostname or "", url.port).detach())
            socket.bind(self.address)
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            raise to_bind_error(self._name, self.address, error.errno, str(error.strerror)) from error
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self._owns_loop_monitor = self.loop_monitor is None
        self.loop_monitor = self.loop_monitor or LoopMonitor()
        self.protocol = ServerProtocol(socket, self._secret, self.settings, self.loop_monitor)
        self.driver = SocketDriver(socket, self.protocol, self._handle_events, self._name)
        self.driver.start()
        return self

    async def close(self) -> None:
        """Cancel all open requests, answer them with PeerLost, and disconnect."""
        self._closing = True
        for key in list(self._tasks):
            self._cancel_request(key, PeerLost("the server is closing"))
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSE_TIMEOUT)
        await self.driver.stop()
        if self._owns_loop_monitor and self.loop_monitor is not None:
            self.loop_monitor.stop()

    @property
    def num_open_requests(self) -> int:
        """The number of requests that are not answered yet."""
        return len(self._tasks)

    @property
    def num_clients(self) -> int:
        """The number of clients that are connected or may reconnect."""
        return len(self.protocol.sessions)

    @property
    def num_rejected(self) -> int:
        """The number of connections that were rejected."""
        return self.protocol.num_rejected

    def _handle_events(self, events: Sequence[ProtocolEvent]) -> None:
        for event in events:
            match event:
                case ("request", session, header, body):
                    self._start_request(IncomingRequest(self, session, header, body))
                case ("cancel", session, request_id):
                    self._cancel_request((session, request_id), RequestCancelled("the client cancelled the request"))
                case ("client_gone", session, reason):
                    for key in [key for key in self._tasks if key[0] is session]:
                        self._cancel_request(key, RequestCancelled(f"the client is gone: {reason}"))
                case ("failed", error):
                    self.failed.set()
                    for key in list(self._tasks):
                        self._cancel_request(key, PeerLost(f"the server's socket failed: {error!r}"))
                    raise error
                case _:
                    raise AssertionError(event)

    def _start_request(self, request: IncomingRequest) -> None:
        key = (request.session, request.header.request_id)
        error: RamifyError | None = None
        if self._closing:
            error = PeerLost("the server is closing")
        elif len(self._tasks) >= self.settings.max_open_requests:
            error = QueueFull(f"{len(self._tasks)} requests are already open")
        elif key in self._tasks:
            error = RequestInvalid(f"request {request.header.request_id} is already open")
        elif request.header.method not in self._handlers:
            error = RequestInvalid(f"unknown method {request.header.method!r}; known: {', '.join(self._handlers)}")
        if error is not None:
            self._send_response(request, error)
            return
        name = f"{request.header.method} {request.header.request_id}"
        # A new context: this may run in the task of another request, whose context variables must not leak into it.
        task = asyncio.create_task(self._handle(request), name=name, context=Context())
        task.add_done_callback(lambda task: self._finish_request(key, request, task))
        self._tasks[key] = task

    async def _handle(self, request: IncomingRequest) -> WireMessage:
        method = request.header.method
        async with fail_after(request.timeout, method):
            return await self._handlers[method](request)

    def _finish_request(self, key: RequestKey, request: IncomingRequest, task: "asyncio.Task[WireMessage]") -> None:
        del self._tasks[key]
        reason = self._cancel_reasons.pop(key, None)
        if task.cancelled():
            self._send_response(request, reason or RequestCancelled("the server cancelled the request"))
        else:
            self._send_response(request, task.exception() or task.result())

    def _send_response(self, request: IncomingRequest, response: WireMessage | BaseException) -> None:
        request_id = request.header.request_id
        if isinstance(response, WireMessage) and len(response.frames) > MAX_BODY_FRAMES:
            response = RequestInvalid(
                f"the reply has {len(response.frames)} frames, at most {MAX_BODY_FRAMES} are allowed"
            )
        if isinstance(response, WireMessage):
            self.driver.submit(request.session, ReplyHeader(0, 0, request_id), response.frames)
        else:
            failure = truncate_failure(Failure.from_exception(response))
            self.driver.submit(request.session, FailureHeader(0, 0, request_id, failure), ())

    def _cancel_request(self, key: RequestKey, reason: RamifyError) -> None:
        task = self._tasks.get(key)
        if task is not None and key not in self._cancel_reasons:
            self._cancel_reasons[key] = reason
            task.cancel()
