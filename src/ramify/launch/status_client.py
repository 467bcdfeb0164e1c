"""How a run is, asked of the run itself. Only its orchestrator opens the run's database while it lives."""

from typing import Any

import httpx

from ramify.errors import ProviderError

DEFAULT_TIMEOUT = 5.0  # seconds for an answer


class StatusClient:
    """Asks one run. Every call ends within `patience` seconds, with an answer or with ProviderError."""

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.address = address
        self._options: dict[str, Any] = {"timeout": timeout, "trust_env": False, "verify": False}

    def get(self, path: str, **query: str) -> Any:
        """What the run answers."""
        try:
            return self._parse_json(httpx.get(f"{self.address}{path}", params=query, **self._options), path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable_error(path, error) from error

    async def get_async(self, path: str = "/status") -> Any:
        """The same, for a loop that must not stand still."""
        try:
            async with httpx.AsyncClient(**self._options) as http:
                return self._parse_json(await http.get(f"{self.address}{path}"), path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable_error(path, error) from error

    def _parse_json(self, response: httpx.Response, path: str) -> Any:
        try:
            return response.raise_for_status().json()
        except ValueError as error:
            raise ProviderError(f"{self.address}{path} answered with something else than JSON") from error

    def _unreachable_error(self, path: str, error: Exception) -> ProviderError:
        return ProviderError(f"{self.address}{path} does not answer: {str(error) or type(error).__name__}")
