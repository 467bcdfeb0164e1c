"""The adapter of the native engine, which knows its version and reports it with every token."""

from typing import Any

from ramify.core.errors import ProviderError, WeightsRefused
from ramify.infer.client.engine_adapter import EngineAdapter, WeightUpdate
from ramify.infer.client.generate_api import GenerateChoice, GenerateRequest, decode_json
from ramify.infer.client.http_client import send_request
from ramify.trace import VersionRun
from ramify.trace.version import PolicyVersion


class NativeAdapter(EngineAdapter):
    """One native server."""

    async def update(self, update: WeightUpdate, *, paused: bool) -> float:
        """Load published weights; the server swaps them between two engine steps."""
        body = {"path": str(update.directory), "kv": update.kv_mode, "run": update.run}
        data = await send_request(self._http, "POST", "/update_weights", body)
        response = decode_json(data, dict[str, Any], self.url)
        self.version = PolicyVersion(**response["version"])
        if self.version != update.version:
            raise WeightsRefused(
                f"{update.directory} holds {self.version}, not {update.version}; {self.url} serves it now"
            )
        return float(response["seconds"])

    def _build_body(self, request: GenerateRequest) -> dict[str, Any]:
        return {**super()._build_body(request), "flat_logprobs": True}

    def _build_logprobs_start(self, start: int) -> dict[str, int]:
        return {"logprobs_start": start}

    def _parse_version_runs(self, choice: GenerateChoice, num_tokens: int) -> tuple[VersionRun, ...]:
        runs = tuple(VersionRun(*run) for run in choice.policy_versions or ())
        if sum(run.count for run in runs) != num_tokens:
            raise ProviderError(f"{self.url} returned {num_tokens} tokens whose versions do not add up: {runs}")
        return runs
