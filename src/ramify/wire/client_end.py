"""The client's end: one connection to one server, made again whenever it breaks.

    MEETING --Welcome to the last Hello--> MET --silence, or Who--> MEETING
       |
       +--Refused--> REFUSED

A server that comes back without memory gives another session: what was asked in the one before is lost, and whoever
waits for it hears so.
"""

import uuid
from collections.abc import Sequence
from enum import Enum

import zmq

from ramify.wire.address import proof
from ramify.wire.frames import (
    VERSION,
    Again,
    Beat,
    Bye,
    Fail,
    Header,
    Hello,
    Malformed,
    Part,
    Refused,
    Reply,
    Said,
    Welcome,
    Who,
    decode,
    encode,
)
from ramify.wire.link import Link
from ramify.wire.message import Message
from ramify.wire.pulse import Pulse
from ramify.wire.pump import Event, sender
from ramify.wire.server_end import ACK_EVERY, beat
from ramify.wire.settings import Settings
from ramify.wire.standstill import Standstill

KNOCK = 0.05  # seconds between two hellos at first
KINDS = {Part: "part", Reply: "reply", Fail: "fail"}


class State(Enum):
    """Where a connection is."""

    MEETING = "meeting"
    MET = "met"
    REFUSED = "refused"


class ClientEnd:
    """One client."""

    def __init__(self, socket: "zmq.Socket[bytes]", secret: str | None, settings: Settings, pulse: Pulse) -> None:
        self.events: list[Event] = []
        self.client = uuid.uuid4().hex
        self.state = State.MEETING
        self.link = Link()
        self.epoch = 0  # the sessions that were lost
        self.heard = 0.0
        self.beat = Beat(0, 0)  # the server's last
        self.max_frame = settings.max_frame
        self.parted = False
        self._parting = False
        self._session = ""
        self._lost = False
        self._said = 0.0  # when a hello or a beat was last sent
        self._knocks = 0  # since the server was last met
        self._hellos = 0  # since the start
        self._standstill = Standstill(settings.patience)
        self._send = sender(socket)
        self._secret, self._settings, self._pulse = secret, settings, pulse

    def come(self, frames: Sequence[zmq.Frame], now: float) -> None:
        try:
            self._hear(decode(frames[0].buffer, len(frames)), frames[1:], now)
        except Malformed:
            return  # not from a server of ours; silence will tell
        self.heard = now

    def told(self, command: Event, now: float) -> None:
        epoch, header, body = command
        if epoch == self.epoch:
            self.link.add(header, body)
            self._flush()

    def tick(self, now: float) -> float:
        interval = self._settings.interval
        self.heard = min(now, (self.heard or now) + self._standstill.measure(now))
        if self.state is State.REFUSED:
            return interval
        if now - self.heard > self._settings.patience and not self._lost:
            self._lost, self.state = True, State.MEETING
            self.events.append(("lost", f"it has not been heard for {self._settings.patience:g} s"))
        if self.state is State.MEETING:
            wait = min(KNOCK * 2**self._knocks, interval)
            if now - self._said >= wait and self._greet():
                self._said, self._knocks = now, min(self._knocks + 1, 10)
            return KNOCK / 2
        if now - self._said >= interval:
            self._said = now
            self._flush()
            self._say(beat(self.link, self._pulse))
        return min(interval / 4, 0.25)

    def end(self) -> None:
        self.parted = self.state is not State.MET
        self._parting = True
        self._flush()
        self._say(Bye())

    def _hear(self, said: Said, body: Sequence[zmq.Frame], now: float) -> None:
        match said:
            case Welcome(knock=knock) if 0 < knock < self._hellos:
                self._said = now + self._settings.interval  # wait for the answers to later hellos
            case Welcome():
                self._meet(said)
            case Part() | Reply() | Fail():
                self._number(said, body)
            case Beat():
                self.beat = said
                self.link.acknowledged(min(said.got, self.link.sent))
                if said.sent > self.link.got and self.state is State.MET:
                    self._say(Again(self.link.got))
            case Again():
                self.link.rewind(min(said.got, self.link.sent))
                self._flush()
            case Who():
                self._again()
            case Bye():
                self.parted = True
                if not self._parting:
                    self._say(Bye())
                    self._again()
                    self._lost = True
                    self.events.append(("lost", "it has closed"))
            case Refused():
                self.state = State.REFUSED
                self.events.append(("refused", said.failure))
            case _:
                raise Malformed(f"a server does not say {type(said).__name__}")

    def _meet(self, welcome: Welcome) -> None:
        if self._session and self._session != welcome.session:
            self.link, self.epoch = Link(), self.epoch + 1
            self.events.append(("forgotten", self.epoch))
        self._session, self.max_frame = welcome.session, welcome.max_frame
        self.state, self._lost, self._knocks = State.MET, False, 0
        self.link.rewind(min(welcome.got, self.link.sent))
        self.events.append(("met",))
        self._flush()

    def _number(self, said: Part | Reply | Fail, body: Sequence[zmq.Frame]) -> None:
        if self.state is not State.MET:
            return
        if not self.link.take(said):
            if self.link.gap(said.number - 1):
                self._say(Again(self.link.got))
            return
        what = said.failure if isinstance(said, Fail) else Message([frame.buffer for frame in body])
        self.events.append((KINDS[type(said)], said.id, what))
        if self.link.got - self.link.told >= ACK_EVERY:
            self._say(beat(self.link, self._pulse))

    def _again(self) -> None:
        """Introduce ourselves anew."""
        if self.state is State.MET:
            self.state, self._said, self._knocks = State.MEETING, 0.0, 0

    def _greet(self) -> bool:
        secret_proof, knock = proof(self._secret, self.client), self._hellos + 1
        if not self._say(Hello(VERSION, self.client, secret_proof, self.link.got, self._session, knock)):
            return False
        self._hellos = knock
        return True

    def _flush(self) -> None:
        if self.state is State.MET:
            self.link.flush(self._send)

    def _say(self, header: Header) -> bool:
        return self._send([encode(header)])
