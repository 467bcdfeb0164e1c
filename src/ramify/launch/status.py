"""How a run is, asked of the run itself. Only its orchestrator opens the run's database while it lives."""

from typing import Any

import httpx

from ramify.errors import ProviderError

PATIENCE = 5.0  # seconds for an answer


class StatusClient:
    """Asks one run. Every call ends within `patience` seconds, with an answer or with ProviderError."""

    def __init__(self, address: str, *, patience: float = PATIENCE) -> None:
        self.address = address
        self._options: dict[str, Any] = {"timeout": patience, "trust_env": False, "verify": False}

    def ask(self, path: str, **query: str) -> Any:
        """What the run answers."""
        try:
            return self._read(httpx.get(f"{self.address}{path}", params=query, **self._options), path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._gone(path, error) from error

    async def look(self, path: str = "/status") -> Any:
        """The same, for a loop that must not stand still."""
        try:
            async with httpx.AsyncClient(**self._options) as http:
                return self._read(await http.get(f"{self.address}{path}"), path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._gone(path, error) from error

    def _read(self, answer: httpx.Response, path: str) -> Any:
        try:
            return answer.raise_for_status().json()
        except ValueError as error:
            raise ProviderError(f"{self.address}{path} answered with something else than JSON") from error

    def _gone(self, path: str, error: Exception) -> ProviderError:
        return ProviderError(f"{self.address}{path} does not answer: {str(error) or type(error).__name__}")
