"""Both ends of the protocol over a network that the test controls: delays, lost connections, ends that stand still."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ramify.wire.client_protocol import ClientProtocol, ConnectionState
from ramify.wire.headers import ReplyHeader, RequestHeader
from ramify.wire.loop_monitor import LoopMonitor
from ramify.wire.server_protocol import ServerProtocol
from ramify.wire.settings import WireSettings

SETTINGS = WireSettings(heartbeat_interval=1.0, server_timeout=10.0, session_timeout=30.0)
STEP = 0.2  # seconds between two turns of an end


@pytest.fixture(scope="module")
def pulse() -> Iterator[LoopMonitor]:
    async def make() -> LoopMonitor:
        return LoopMonitor()

    with asyncio.Runner() as runner:
        pulse = runner.run(make())
        yield pulse
        pulse.stop()


class Wire:
    """One direction of a connection: a queue, as a socket sees it."""

    def __init__(self, network: "Network") -> None:
        self._network = network
        self.queue: list[tuple[float, list[bytes]]] = []

    def send_multipart(self, frames, flags=0, copy=True) -> None:
        self.queue.append((self._network.now, [bytes(frame) for frame in frames]))

    def take(self, count: int) -> list[list[zmq.Frame]]:
        arrived = [frames for sent, frames in self.queue if sent + self._network.latency <= self._network.now][:count]
        del self.queue[: len(arrived)]
        return [[zmq.Frame(frame) for frame in frames] for frames in arrived]


class Network:
    """A client and a server. Time passes for both; an end that stands still neither hears nor ticks."""

    def __init__(self, pulse: LoopMonitor) -> None:
        self.now, self.route, self.latency = 100.0, 1, 0.0
        self.up, self.down = Wire(self), Wire(self)
        self.client = ClientProtocol(self.up, None, SETTINGS, pulse)  # pyright: ignore[reportArgumentType]
        self.server = ServerProtocol(self.down, None, SETTINGS, pulse)  # pyright: ignore[reportArgumentType]
        self.asked = 0
        self.runs: list[int] = []  # requests that reached the server's handlers
        self.answers: list[int] = []
        self.epochs: dict[int, int] = {}  # of requests, by id
        self.lost = 0  # connections to a server that has forgotten

    def call(self) -> None:
        """Ask, and let the server answer as soon as it hears of it."""
        self.asked += 1
        self.epochs[self.asked] = self.client.session_number
        self.client.handle_command(
            (self.client.session_number, RequestHeader(0, 0, self.asked, "work", 60.0), (b"",)), self.now
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def turn_client(self, count: int = 1000) -> None:
        for route, *frames in self.down.take(count):
            if route.bytes == b"%d" % self.route:  # what was sent over an earlier connection is lost
                self.client.message_received(frames, self.now)
        self.client.tick(self.now)
        events, self.client.events = self.client.events, []
        for event in events:
            assert event[0] != "refused", event
            self.lost += event[0] == "forgotten"
            if event[0] == "reply":
                self.answers.append(event[1])

    def turn_server(self, count: int = 1000) -> None:
        for frames in self.up.take(count):
            self.server.message_received([zmq.Frame(b"%d" % self.route), *frames], self.now)
        self.server.tick(self.now)
        events, self.server.events = self.server.events, []
        for event in events:
            if event[0] == "request":
                _, session, header, _ = event
                self.runs.append(header.request_id)
                self.server.handle_command((session, ReplyHeader(0, 0, header.request_id), (b"",)), self.now)

    def cut(self) -> None:
        """The connection breaks, with all that is on its way, and is made again."""
        self.up.queue.clear()
        self.down.queue.clear()
        self.route += 1

    def settle(self) -> None:
        """Let everything that is on its way arrive."""
        for _ in range(40):
            self.pass_time(STEP)
            self.turn_server()
            self.turn_client()


def met(pulse: LoopMonitor, answers: int = 0) -> Network:
    network = Network(pulse)
    network.settle()
    for _ in range(answers):
        network.call()
    network.settle()
    assert (network.client.state, len(network.answers)) == (ConnectionState.CONNECTED, answers)
    return network


def test_a_server_that_stood_still_has_not_lost_its_clients(pulse: LoopMonitor):
    """The server's own standstill is no silence of the client's: nobody is forgotten."""
    network = met(pulse, answers=6)
    network.call()
    for _ in range(200):  # 40 seconds in which the client runs and the server does not
        network.pass_time(STEP)
        network.turn_client()
    network.turn_server(0)  # its clock runs before the network has brought anything
    network.settle()
    assert network.lost == 0
    assert network.answers == list(range(1, 8))


def test_a_client_that_stood_still_has_not_lost_its_server(pulse: LoopMonitor):
    network = met(pulse, answers=6)
    network.pass_time(15.0)
    network.client.tick(network.now)
    assert network.client.state is ConnectionState.CONNECTED
    assert [event for event in network.client.events if event[0] == "lost"] == []


def test_a_client_that_was_forgotten_introduces_itself_as_often_as_it_needs_to(pulse: LoopMonitor):
    """It knocks again while the first welcome is on its way, and still counts what it got in the forgotten session."""
    network = met(pulse, answers=600)
    for _ in range(200):  # the client stands still for longer than the server's grace
        network.pass_time(STEP)
        network.turn_server()
    assert network.server.sessions == {}
    network.turn_client()
    network.turn_server()
    for _ in range(20):
        network.pass_time(STEP)
        network.turn_client()
    network.turn_server()
    assert len(network.server.sessions) == 1
    network.settle()
    assert (network.client.state, network.lost) == (ConnectionState.CONNECTED, 1)
    network.call()
    network.settle()
    assert network.answers == list(range(1, 602))


def test_a_server_that_answers_late_is_met_all_the_same(pulse: LoopMonitor):
    """Answers take longer than the client waits before it knocks again."""
    network = Network(pulse)
    network.latency = 2.5
    network.settle()
    network.settle()
    assert network.client.state is ConnectionState.CONNECTED


TURNS = st.sampled_from([1, 3, 60, 200])  # of STEP seconds: up to 40, longer than patience and grace
ACTIONS = st.one_of(
    st.tuples(st.just("call"), st.just(1)),
    st.tuples(st.just("client"), TURNS),
    st.tuples(st.just("server"), TURNS),
    st.tuples(st.just("both"), st.just(5)),
    st.tuples(st.just("neither"), TURNS),
    st.tuples(st.just("cut"), st.just(1)),
)


@given(st.lists(ACTIONS, min_size=5, max_size=20))
def test_however_slow_either_end_is_nobody_is_refused_and_every_call_is_answered_once(pulse: LoopMonitor, actions):
    network = met(pulse, answers=3)
    for who, turns in actions:
        if who == "call":
            network.call()
        elif who == "cut":
            network.cut()
        else:
            for turn in range(turns):
                network.pass_time(STEP)
                arriving = 1000 if turn else 0  # an end that wakes up looks at its clock first
                if who in ("client", "both"):
                    network.turn_client(arriving)
                if who in ("server", "both"):
                    network.turn_server(arriving)
    network.settle()
    network.settle()
    assert network.client.state is ConnectionState.CONNECTED
    assert len(set(network.runs)) == len(network.runs)
    assert len(set(network.answers)) == len(network.answers)
    current = {id for id, epoch in network.epochs.items() if epoch == network.client.session_number}
    assert current <= set(network.answers)
