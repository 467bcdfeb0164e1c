"""Client and server protocol over a simulated network: latency, lost connections, paused processes."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ramify.processes.wire.client_protocol import ClientProtocol, ConnectionState
from ramify.processes.wire.loop_monitor import LoopMonitor
from ramify.processes.wire.message import ReplyHeader, RequestHeader, WireSettings
from ramify.processes.wire.server_protocol import ServerProtocol

SETTINGS = WireSettings(heartbeat_interval=1.0, server_timeout=10.0, session_timeout=30.0)
STEP = 0.2  # seconds between two runs of a side


@pytest.fixture(scope="module")
def loop_monitor() -> Iterator[LoopMonitor]:
    async def make() -> LoopMonitor:
        return LoopMonitor()

    with asyncio.Runner() as runner:
        loop_monitor = runner.run(make())
        yield loop_monitor
        loop_monitor.stop()


class Direction:
    """One direction of a connection: a queue with the `send_multipart` of a socket."""

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
    """A client and a server with a simulated clock; a side that is not run is paused."""

    def __init__(self, loop_monitor: LoopMonitor) -> None:
        self.now, self.routing_id, self.latency = 100.0, 1, 0.0
        self.up, self.down = Direction(self), Direction(self)
        self.client = ClientProtocol(self.up, None, SETTINGS, loop_monitor)
        self.server = ServerProtocol(self.down, None, SETTINGS, loop_monitor)
        self.num_calls = 0
        self.runs: list[int] = []  # requests that reached the server's handlers
        self.replies: list[int] = []
        self.session_numbers: dict[int, int] = {}  # of requests, by id
        self.num_resets = 0  # sessions that the server has closed

    def call(self) -> None:
        """Send a request; the server replies as soon as it receives it."""
        self.num_calls += 1
        self.session_numbers[self.num_calls] = self.client.session_number
        self.client.handle_command(
            (self.client.session_number, RequestHeader(0, 0, self.num_calls, "work", 60.0), (b"",)), self.now
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def run_client(self, count: int = 1000) -> None:
        for routing_id, *frames in self.down.take(count):
            if routing_id.bytes == b"%d" % self.routing_id:  # messages of an earlier connection are lost
                self.client.message_received(frames, self.now)
        self.client.tick(self.now)
        events, self.client.events = self.client.events, []
        for event in events:
            assert event[0] != "rejected", event
            self.num_resets += event[0] == "session_reset"
            if event[0] == "reply":
                self.replies.append(event[1])

    def run_server(self, count: int = 1000) -> None:
        for frames in self.up.take(count):
            self.server.message_received([zmq.Frame(b"%d" % self.routing_id), *frames], self.now)
        self.server.tick(self.now)
        events, self.server.events = self.server.events, []
        for event in events:
            if event[0] == "request":
                _, session, header, _ = event
                self.runs.append(header.request_id)
                self.server.handle_command((session, ReplyHeader(0, 0, header.request_id), (b"",)), self.now)

    def cut(self) -> None:
        """Break the connection, drop what is in flight, and reconnect."""
        self.up.queue.clear()
        self.down.queue.clear()
        self.routing_id += 1

    def settle(self) -> None:
        """Deliver everything that is in flight."""
        for _ in range(40):
            self.pass_time(STEP)
            self.run_server()
            self.run_client()


def connect(loop_monitor: LoopMonitor, replies: int = 0) -> Network:
    network = Network(loop_monitor)
    network.settle()
    for _ in range(replies):
        network.call()
    network.settle()
    assert (network.client.state, len(network.replies)) == (ConnectionState.CONNECTED, replies)
    return network


def test_pause_of_the_server_does_not_close_sessions(loop_monitor: LoopMonitor):
    network = connect(loop_monitor, replies=6)
    network.call()
    for _ in range(200):  # 40 seconds in which the client runs and the server does not
        network.pass_time(STEP)
        network.run_client()
    network.run_server(0)  # its timers run before it has received anything
    network.settle()
    assert network.num_resets == 0
    assert network.replies == list(range(1, 8))


def test_pause_of_the_client_does_not_lose_the_server(loop_monitor: LoopMonitor):
    network = connect(loop_monitor, replies=6)
    network.pass_time(15.0)
    network.client.tick(network.now)
    assert network.client.state is ConnectionState.CONNECTED
    assert [event for event in network.client.events if event[0] == "lost"] == []


def test_client_of_a_closed_session_gets_a_new_session(loop_monitor: LoopMonitor):
    """Its repeated hellos, sent before the first welcome arrives, still acknowledge messages of the closed session."""
    network = connect(loop_monitor, replies=600)
    for _ in range(200):  # the client is paused for longer than the session timeout
        network.pass_time(STEP)
        network.run_server()
    assert network.server.sessions == {}
    network.run_client()
    network.run_server()
    for _ in range(20):
        network.pass_time(STEP)
        network.run_client()
    network.run_server()
    assert len(network.server.sessions) == 1
    network.settle()
    assert (network.client.state, network.num_resets) == (ConnectionState.CONNECTED, 1)
    network.call()
    network.settle()
    assert network.replies == list(range(1, 602))


def test_handshake_succeeds_when_latency_exceeds_the_hello_interval(loop_monitor: LoopMonitor):
    network = Network(loop_monitor)
    network.latency = 2.5
    network.settle()
    network.settle()
    assert network.client.state is ConnectionState.CONNECTED


RUNS = st.sampled_from([1, 3, 60, 200])  # of STEP seconds: up to 40 s, longer than both timeouts
ACTIONS = st.one_of(
    st.tuples(st.just("call"), st.just(1)),
    st.tuples(st.just("client"), RUNS),
    st.tuples(st.just("server"), RUNS),
    st.tuples(st.just("both"), st.just(5)),
    st.tuples(st.just("neither"), RUNS),
    st.tuples(st.just("cut"), st.just(1)),
)


@given(st.lists(ACTIONS, min_size=5, max_size=20))
def test_no_pause_or_cut_rejects_a_client_or_repeats_a_reply(loop_monitor: LoopMonitor, actions):
    network = connect(loop_monitor, replies=3)
    for side, runs in actions:
        if side == "call":
            network.call()
        elif side == "cut":
            network.cut()
        else:
            for run in range(runs):
                network.pass_time(STEP)
                arriving = 1000 if run else 0  # a side that was paused runs its timers first
                if side in ("client", "both"):
                    network.run_client(arriving)
                if side in ("server", "both"):
                    network.run_server(arriving)
    network.settle()
    network.settle()
    assert network.client.state is ConnectionState.CONNECTED
    assert len(set(network.runs)) == len(network.runs)
    assert len(set(network.replies)) == len(network.replies)
    current = network.client.session_number
    assert {id for id, number in network.session_numbers.items() if number == current} <= set(network.replies)
