"""The server's end: who is connected, what they have not acknowledged, and who is cut off.

A client is a session, not a socket: it may come back over another connection and goes on where it was. One that sends
what is no frame, or takes nothing it is sent, is refused; the others never notice.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence

import zmq

from ramify.errors import Failure, PeerRefused, QueueFull, RamifyError
from ramify.wire.address import proof
from ramify.wire.frames import (
    VERSION,
    Again,
    Beat,
    Bye,
    Cancel,
    Header,
    Hello,
    Malformed,
    Refused,
    Request,
    Said,
    Welcome,
    Who,
    decode,
    encode,
)
from ramify.wire.link import Link
from ramify.wire.message import Message
from ramify.wire.pulse import SUSPECT, Pulse
from ramify.wire.pump import Event, sender
from ramify.wire.settings import Settings
from ramify.wire.standstill import Standstill

BANNED = 4096  # connections that are remembered as cut off
ACK_EVERY = 16  # frames after which a client is told that they came


class Session:
    """One client, over however many connections."""

    def __init__(self, client: str, route: bytes, now: float) -> None:
        self.client, self.route = client, route
        self.name = secrets.token_hex(8)
        self.link = Link()
        self.heard, self.beaten = now, 0.0
        self.over = False


class ServerEnd:
    """All clients of one server."""

    def __init__(self, socket: "zmq.Socket[bytes]", secret: str | None, settings: Settings, pulse: Pulse) -> None:
        self.events: list[Event] = []
        self.sessions: dict[str, Session] = {}
        self.refused = 0
        self._send = sender(socket)
        self._secret, self._settings, self._pulse = secret, settings, pulse
        self._routes: dict[bytes, Session] = {}
        self._banned: OrderedDict[bytes, None] = OrderedDict()
        self._parting = False
        self._standstill = Standstill(settings.grace)

    # -- turned by the pump --------------------------------------------------------------------------------------------

    def come(self, frames: Sequence[zmq.Frame], now: float) -> None:
        route = frames[0].bytes
        if route in self._banned:
            return
        try:
            if len(frames) < 2:
                raise Malformed("an empty message")
            said = decode(frames[1].buffer, len(frames))
            self._hear(route, said, frames[2:], now)
        except Malformed as error:
            self._refuse(route, PeerRefused(f"malformed: {error}"))
        except RamifyError as error:
            self._refuse(route, error)

    def told(self, command: Event, now: float) -> None:
        session, header, body = command
        if not session.over:
            session.link.add(header, body)
            self._flush(session)

    def tick(self, now: float) -> float:
        interval = self._settings.interval
        paused = self._standstill.measure(now)
        for session in list(self.sessions.values()):
            session.heard = min(now, session.heard + paused)
            if now - session.heard > self._settings.grace:
                self._drop(session, f"not heard for {self._settings.grace:g} s")
            elif session.link.kept_bytes > self._settings.max_kept:
                self._refuse(session.route, PeerRefused(f"{session.link.kept} frames were never acknowledged"))
            elif now - session.beaten >= interval:
                session.beaten = now
                self._flush(session)
                self._say(session.route, beat(session.link, self._pulse))
        return min(interval / 4, 0.25)

    def end(self) -> None:
        self._parting = True
        for session in self.sessions.values():
            self._flush(session)
            self._say(session.route, Bye())

    @property
    def parted(self) -> bool:
        return not self.sessions

    # -- what is said --------------------------------------------------------------------------------------------------

    def _hear(self, route: bytes, said: Said, body: Sequence[zmq.Frame], now: float) -> None:
        if isinstance(said, Hello):
            self._greet(route, said, now)
            return
        session = self._routes.get(route)
        if session is None:
            self._say(route, Who())
            return
        session.heard = now
        match said:
            case Request() | Cancel():
                self._number(session, said, body)
            case Beat():
                session.link.acknowledged(said.got)
                if said.sent > session.link.got:
                    self._say(route, Again(session.link.got))
            case Again():
                session.link.rewind(said.got)
                self._flush(session)
            case Bye():
                if not self._parting:
                    self._say(route, Bye())
                self._drop(session, "said goodbye")
            case _:
                raise Malformed(f"a client does not say {type(said).__name__}")

    def _greet(self, route: bytes, hello: Hello, now: float) -> None:
        if hello.version != VERSION:
            raise PeerRefused(f"the client speaks version {hello.version} of the wire, this server {VERSION}")
        if not hmac.compare_digest(hello.proof, proof(self._secret, hello.client)):
            raise PeerRefused("the client does not know the secret of this server")
        session = self.sessions.get(hello.client)
        if session is None:
            if len(self.sessions) >= self._settings.max_clients:
                raise QueueFull(f"{len(self.sessions)} clients are connected already")
            session = self.sessions[hello.client] = Session(hello.client, route, now)
        self._routes.pop(session.route, None)
        self._routes[route] = session
        session.route, session.heard = route, now
        session.link.rewind(hello.got if hello.session == session.name else 0)
        self._say(route, Welcome(session.name, session.link.got, self._settings.max_frame, hello.knock))
        self._flush(session)

    def _number(self, session: Session, said: Request | Cancel, body: Sequence[zmq.Frame]) -> None:
        link = session.link
        if not link.take(said):
            if link.gap(said.number - 1):
                self._say(session.route, Again(link.got))
            return
        if isinstance(said, Request):
            self.events.append(("request", session, said, Message([frame.buffer for frame in body])))
        else:
            self.events.append(("cancel", session, said.id))
        if link.got - link.told >= ACK_EVERY:
            self._say(session.route, beat(link, self._pulse))

    def _flush(self, session: Session) -> None:
        session.link.flush(lambda frames: self._send([session.route, *frames]))

    def _say(self, route: bytes, header: Header) -> None:
        self._send([route, encode(header)])

    def _refuse(self, route: bytes, error: RamifyError) -> None:
        self.refused += 1
        self._say(route, Refused(Failure(error.name, error.message, error.blame, error.retryable)))
        self._banned[route] = None
        while len(self._banned) > BANNED:
            self._banned.popitem(last=False)
        if (session := self._routes.get(route)) is not None:
            self._drop(session, error.message)

    def _drop(self, session: Session, why: str) -> None:
        session.over = True
        self.sessions.pop(session.client, None)
        self._routes.pop(session.route, None)
        self.events.append(("gone", session, why))


def beat(link: Link, pulse: Pulse) -> Beat:
    """A sign of life that says what came, and how the loop beside it does."""
    lag = pulse.lag
    task, stack = pulse.doing() if lag > SUSPECT else ("", "")
    link.told = link.got
    return Beat(link.got, link.flushed, lag, task, stack)
