"""The address book of a run: where its engines, models and env servers can be reached now.

On a cluster, a process may be restarted on another node, so addresses change while a run goes on. The supervisor then
replaces `addresses.json` in the run directory, and the orchestrator, which reads the file every second, connects to the
new addresses. A run on one machine has no such file: its configuration has the addresses.

    {"inference": ["http://10.0.0.2:8000"], "models/judge": [...], "env/train/reverse": ["tcp://10.0.0.3:5000", ...]}
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from ramify.core.async_calls import AsyncService, call_storage, cancel_all
from ramify.core.errors import ConfigInvalid, StorageFailed
from ramify.core.files import read_bytes, write_atomically

ADDRESS_BOOK_FILE = "addresses.json"
INFERENCE_KEY = "inference"
MODEL_PREFIX = "models/"  # of the keys of other models than the policy, and of the processes that serve them
POLL_INTERVAL = 1.0  # seconds
RETRY_TIME = 60.0  # seconds for which an unreadable file is read again

OnAddresses = Callable[[list[str]], None]


def get_model_key(name: str) -> str:
    """Return the key of the servers of a model in `[models]`."""
    return f"{MODEL_PREFIX}{name}"


def get_env_key(kind: str, source_name: str) -> str:
    """Return the key of the env servers of a source; `kind` is `train` or `eval`."""
    return f"env/{kind}/{source_name}"


def write_addresses(run_directory: Path, addresses: Mapping[str, Sequence[str]]) -> None:
    """Replace the address book of a run."""
    write_atomically(run_directory / ADDRESS_BOOK_FILE, msgspec.json.encode(addresses))


def read_addresses(run_directory: Path) -> dict[str, list[str]] | None:
    """Return the addresses by key; None if the run has no address book.

    Raises ConfigInvalid if it is malformed, and StorageFailed if it cannot be read.
    """
    path = run_directory / ADDRESS_BOOK_FILE
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, list[str]])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        expected = 'expected lists of addresses by key, {"inference": ["http://HOST:PORT"]}'
        raise ConfigInvalid(f"{path} is not an address book: {error}; {expected}") from error


class AddressBook(AsyncService):
    """The current addresses of a run. It reads the file from `start` to `close`, and notifies its subscribers.

    `addresses` is None until the run has an address book.
    """

    def __init__(
        self, run_directory: Path, *, poll_interval: float = POLL_INTERVAL, retry_time: float = RETRY_TIME
    ) -> None:
        self._run_directory, self._poll_interval, self._retry_time = run_directory, poll_interval, retry_time
        self.addresses: dict[str, list[str]] | None = None
        self._subscribers: list[tuple[str, OnAddresses]] = []
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Read the file, and start to poll it. Raises what `read_addresses` raises."""
        await self._refresh()
        self._polling = asyncio.create_task(self._poll(), name="address book")
        return self

    async def close(self) -> None:
        """Stop polling."""
        if self._polling is not None:
            await cancel_all([self._polling])

    async def wait_failed(self) -> None:
        """Wait until polling fails, and raise its failure."""
        assert self._polling is not None
        await asyncio.shield(self._polling)

    def subscribe(self, key: str, on_addresses: OnAddresses) -> None:
        """Call `on_addresses` with the addresses of a key: now if the book has the key, and whenever they change."""
        self._subscribers.append((key, on_addresses))
        if self.addresses is not None and key in self.addresses:
            on_addresses(self.addresses[key])

    async def _poll(self) -> None:
        num_failed = 0
        while True:
            await asyncio.sleep(self._poll_interval)
            try:
                await self._refresh()
                num_failed = 0
            except StorageFailed:  # the known addresses stay in use meanwhile
                num_failed += 1
                if num_failed * self._poll_interval > self._retry_time:
                    raise

    async def _refresh(self) -> None:
        """Read the file. A key that it no longer has keeps its addresses."""
        read = partial(read_addresses, self._run_directory)
        new_addresses = await call_storage(read, ADDRESS_BOOK_FILE)
        if new_addresses is None:
            return
        before, self.addresses = self.addresses or {}, {**(self.addresses or {}), **new_addresses}
        for key, on_addresses in list(self._subscribers):
            if key in new_addresses and new_addresses[key] != before.get(key):
                on_addresses(new_addresses[key])
