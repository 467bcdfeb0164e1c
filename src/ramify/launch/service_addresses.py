"""Keeps the address book of a run up to date: where its engines, models and env servers can be reached now.

On a cluster a process gets its address when it has a place, and another one whenever it starts again. The supervisor
lists the address before the process starts, so that a client can wait for it to answer.
"""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ramify.launch.launcher import ProcessSpec
from ramify.launch.supervisor import ALIVE_STATES
from ramify.orchestrate.address_book import ADDRESS_BOOK_FILE, write_addresses
from ramify.run.state import ProcessStatus
from ramify.run.store import storage_call


class ServiceAddresses:
    """Writes the address book of one run whenever an address has changed; a run without services has none."""

    def __init__(self, run_directory: Path, specs: Sequence[ProcessSpec]) -> None:
        """Remove the address book of an earlier start, whose processes are gone."""
        self._run_directory = run_directory
        self._services = {spec.name: spec.service for spec in specs if spec.service}
        self._written: dict[str, list[str]] = {}
        with storage_call(run_directory):
            (run_directory / ADDRESS_BOOK_FILE).unlink(missing_ok=True)

    def update(self, statuses: Sequence[ProcessStatus]) -> None:
        """Write the addresses of the processes that run or are being started, by service."""
        addresses: dict[str, list[str]] = {}
        for status in statuses:
            if status.name in self._services and status.address and status.state in ALIVE_STATES:
                url = urlsplit(status.address)
                addresses.setdefault(self._services[status.name], []).append(f"{url.scheme}://{url.netloc}")
        if addresses != self._written:
            with storage_call(self._run_directory):
                write_addresses(self._run_directory, addresses)
            self._written = addresses
