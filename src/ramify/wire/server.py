"""A server: requests become tasks of the event loop, and every one is answered exactly once."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from typing import Self, TypeVar
from urllib.parse import urlsplit

import zmq

from ramify.errors import (
    DeadlineExceeded,
    Failure,
    PeerLost,
    QueueFull,
    RamifyError,
    RequestCancelled,
    RequestInvalid,
)
from ramify.wire.address import check_bind, encrypt
from ramify.wire.frames import MAX_BODY, Fail, Part, Reply, bounded
from ramify.wire.frames import Request as Header
from ramify.wire.listening import is_reserved, not_listening, open_listener
from ramify.wire.message import Message
from ramify.wire.pulse import Pulse
from ramify.wire.pump import Event, Pump
from ramify.wire.server_end import ServerEnd, Session
from ramify.wire.settings import Settings

CLOSING = 30.0  # seconds that handlers have to end once they are cancelled
LONGEST = 30 * 86400.0  # seconds; no deadline is further away

T = TypeVar("T")
Key = tuple[Session, int]


class Request:
    """A request that waits for its answer."""

    def __init__(self, server: "Server", session: Session, header: Header, message: Message) -> None:
        self.header, self.message, self.session = header, message, session
        self._server = server
        self._streaming = True

    @property
    def client(self) -> str:
        """Who asks."""
        return self.session.client

    @property
    def left(self) -> float:
        """Seconds it had when it came."""
        return min(max(0.0, self.header.left), LONGEST)

    def read(self, kind: type[T]) -> T:
        """What it asks; RequestInvalid if that is no `kind`."""
        return self.message.read(kind)

    def part(self, message: Message) -> bool:
        """Send a piece of the answer ahead. Where the client does not keep up, it and all later ones are left out."""
        if self._streaming and self.session.link.kept_bytes > self._server.settings.max_kept // 4:
            self._streaming = False
        if self._streaming:
            self._server.pump.post(self.session, Part(0, 0, self.header.id), message.frames)
        return self._streaming


Handler = Callable[[Request], Awaitable[Message]]


class Server:
    """Serves `handlers` by method name; `start` and `close` (or `async with`) are its life.

    Who has a secret is also encrypted, unless it stays within the machine and says so.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        address: str = "tcp://127.0.0.1:0",
        *,
        secret: str | None = None,
        encrypted: bool = True,
        settings: Settings | None = None,
        pulse: Pulse | None = None,
        name: str = "server",
    ) -> None:
        check_bind(address, secret if encrypted else None)
        self.address, self.settings, self.pulse = address, settings or Settings(), pulse
        self._handlers, self._secret, self._encrypted, self._name = handlers, secret, encrypted, name
        self._tasks: dict[Key, asyncio.Task[Message]] = {}
        self._why: dict[Key, RamifyError] = {}
        self._closing = False
        self.broken = asyncio.Event()
        """The connection has failed; nobody can be answered any more."""

    async def start(self) -> Self:
        """Listen; `address` is then the real one. PortTaken if it is in use, ConfigInvalid if it cannot be ours."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.maxmsgsize = self.settings.max_frame
        socket.sndhwm = socket.rcvhwm = 10_000
        socket.heartbeat_ivl = int(self.settings.interval * 2000)
        socket.heartbeat_timeout = int(self.settings.grace * 1000)
        try:
            if self._secret and self._encrypted:
                encrypt(socket, self._secret, server=True)
            socket.ipv6 = "[" in self.address
            place = urlsplit(self.address)
            if place.scheme == "tcp" and place.port and is_reserved(place.port):
                socket.setsockopt(zmq.USE_FD, open_listener(place.hostname or "", place.port).detach())
            socket.bind(self.address)
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            raise not_listening(self._name, self.address, error.errno, str(error.strerror)) from error
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode()
        self._own_pulse = self.pulse is None
        self.pulse = self.pulse or Pulse()
        self.end = ServerEnd(socket, self._secret, self.settings, self.pulse)
        self.pump = Pump(socket, self.end, self._deliver, self._name)
        self.pump.start()
        return self

    async def close(self) -> None:
        """Answer everything that is open with PeerLost, and go."""
        self._closing = True
        for key in list(self._tasks):
            self._end(key, PeerLost("the server is closing"))
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSING)
        await self.pump.stop()
        if self._own_pulse and self.pulse is not None:
            self.pulse.stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def open(self) -> int:
        """Requests that are not answered yet."""
        return len(self._tasks)

    @property
    def clients(self) -> int:
        """Clients that are connected, or may come back."""
        return len(self.end.sessions)

    @property
    def refused(self) -> int:
        """Connections that were cut off."""
        return self.end.refused

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ("request", session, header, body):
                    self._begin(Request(self, session, header, body))
                case ("cancel", session, id):
                    self._end((session, id), RequestCancelled("the client took the request back"))
                case ("gone", session, why):
                    for key in [key for key in self._tasks if key[0] is session]:
                        self._end(key, RequestCancelled(f"the client is gone: {why}"))
                case ("broken", error):
                    self.broken.set()
                    for key in list(self._tasks):
                        self._end(key, PeerLost(f"the server broke: {error!r}"))
                    raise error
                case _:
                    raise AssertionError(event)

    def _begin(self, request: Request) -> None:
        key = (request.session, request.header.id)
        refused: RamifyError | None = None
        if self._closing:
            refused = PeerLost("the server is closing")
        elif len(self._tasks) >= self.settings.queue:
            refused = QueueFull(f"{len(self._tasks)} requests are open already")
        elif key in self._tasks:
            refused = RequestInvalid(f"request {request.header.id} is open already")
        elif request.header.method not in self._handlers:
            refused = RequestInvalid(f"unknown method {request.header.method!r}; known: {', '.join(self._handlers)}")
        if refused is not None:
            self._answer(request, refused)
            return
        name = f"{request.header.method} {request.header.id}"
        # a context of its own: a turn may be made for another request, whose variables are not ours
        task = asyncio.create_task(self._handle(request), name=name, context=Context())
        task.add_done_callback(lambda task: self._done(key, request, task))
        self._tasks[key] = task

    async def _handle(self, request: Request) -> Message:
        method = request.header.method
        try:
            async with asyncio.timeout(request.left) as scope:
                return await self._handlers[method](request)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"{method} took longer than the {request.left:g} s it had") from error

    def _done(self, key: Key, request: Request, task: "asyncio.Task[Message]") -> None:
        del self._tasks[key]
        why = self._why.pop(key, None)
        if task.cancelled():
            self._answer(request, why or RequestCancelled("it was cancelled in the server"))
        else:
            self._answer(request, task.exception() or task.result())

    def _answer(self, request: Request, answer: Message | BaseException) -> None:
        id = request.header.id
        if isinstance(answer, Message) and len(answer.frames) > MAX_BODY:
            answer = RequestInvalid(f"the answer has {len(answer.frames)} frames, {MAX_BODY} are the most")
        if isinstance(answer, Message):
            self.pump.post(request.session, Reply(0, 0, id), answer.frames)
        else:
            self.pump.post(request.session, Fail(0, 0, id, bounded(Failure.from_exception(answer))), ())

    def _end(self, key: Key, why: RamifyError) -> None:
        task = self._tasks.get(key)
        if task is not None and key not in self._why:
            self._why[key] = why
            task.cancel()
