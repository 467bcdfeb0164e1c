"""One env server as the orchestrator sees it: its connection, its state and its requests in flight."""

import asyncio
import contextlib
from collections.abc import Generator

from ramify.core.errors import RamifyError
from ramify.processes.wire import WireSettings
from ramify.processes.wire.message import ServerState
from ramify.rollout.envserver.client import EnvClient
from ramify.rollout.envserver.messages import AddressUpdate
from ramify.run.state import EnvServerStatus

CONNECT_TIMEOUT = 10.0  # seconds for one try to connect


class ConnectedEnvServer:
    """A server of one source.

    `client` is set once it is connected; `failure` says why it is down, `is_broken` that its workers fail to boot;
    `num_in_flight` counts all requests, `num_done` the attempts that it answered, `num_lost` those that were lost with
    it; setting `check_now` triggers a check.
    """

    def __init__(self, address: str) -> None:
        self.address, self.state = address, ServerState.DOWN
        self.client: EnvClient | None = None
        self.failure: RamifyError | None = None
        self.was_up = self.is_broken = False
        self.num_in_flight = self.num_done = self.num_lost = 0
        self.check_now = asyncio.Event()
        self._sent_update: tuple[AddressUpdate, int] | None = None  # and the session in which it was sent

    @property
    def is_drained(self) -> bool:
        """Whether it was removed and its last request has ended."""
        return self.state is ServerState.REMOVED and not self.num_in_flight

    @property
    def is_pending(self) -> bool:
        """Whether it may still come up."""
        return self.state is ServerState.DOWN and not self.is_broken

    @property
    def is_expected_soon(self) -> bool:
        """Whether it was never up, and nothing is known that keeps it from coming up."""
        return not self.was_up and (self.failure is None or self.failure.retryable)

    @property
    def reason(self) -> str:
        """Why it is down."""
        return "not reached yet" if self.failure is None else f"{self.failure.name}: {self.failure.message}"

    async def connect(self, secret: str | None, settings: WireSettings | None) -> EnvClient:
        """Return the open connection, or open it. Raises PeerLost or PeerRefused."""
        if self.client is None:
            self.client = await EnvClient(self.address, secret, settings=settings).start(CONNECT_TIMEOUT)
        return self.client

    async def send_update(self, client: EnvClient, update: AddressUpdate | None) -> None:
        """Tell the server where the inference servers are, unless it was told so in this session."""
        if update is not None and self._sent_update != (update, client.session_number):
            session_number = client.session_number
            await client.update_addresses(update)
            self._sent_update = (update, session_number)

    @contextlib.contextmanager
    def track_request(self) -> Generator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.is_drained:
                self.check_now.set()

    def describe(self) -> EnvServerStatus:
        """Return address, state and counters."""
        return EnvServerStatus(self.address, self.state.value, self.num_in_flight, self.num_done, self.num_lost)
