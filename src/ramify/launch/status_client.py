"""HTTP client of the status address. A running run must be asked, because its orchestrator holds the database."""

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from ramify.core.errors import ProviderError
from ramify.core.interactive import run_coroutine
from ramify.infer.client.http_client import HttpClient, RequestFailed

DEFAULT_TIMEOUT = 5.0  # seconds for a response


class StatusClient:
    """Sends requests to one run. Every call returns within `timeout` seconds or raises ProviderError."""

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.address, self._timeout = address, timeout

    def get(self, path: str, **query: str) -> Any:
        """Return the response to a GET request, decoded from JSON."""
        return run_coroutine(self.get_async(path, **query))

    async def get_async(self, path: str = "/status", **query: str) -> Any:
        """Do the same without blocking the event loop."""
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            async with (
                asyncio.timeout(self._timeout),
                HttpClient(self.address, connect_timeout=self._timeout, max_connections=1) as http,
            ):
                response = await http.request("GET", target)
        except TimeoutError as error:
            raise ProviderError(f"{self.address}{path} did not respond within {self._timeout:g} s") from error
        except RequestFailed as error:
            raise ProviderError(f"{self.address}{path} does not respond: {error}") from error
        if response.status != 200:
            raise ProviderError(f"{self.address}{path} does not respond: status {response.status}")
        try:
            return msgspec.json.decode(response.body)
        except msgspec.DecodeError as error:
            raise ProviderError(f"{self.address}{path} responded with something other than JSON") from error
