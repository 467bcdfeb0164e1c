"""The client for a run's `[inference]` section.

The caller need not know whether the servers were started for this run or have been running for days: both are
addresses. Starting and stopping servers is done elsewhere.
"""

from collections.abc import Sequence

from ramify.client import ClientConfig, InferenceClient
from ramify.errors import ConfigInvalid
from ramify.infer.config import EngineConfig, ExternalConfig, VLLMConfig
from ramify.trace.version import PolicyVersion


def build_inference_client(
    inference: EngineConfig | VLLMConfig | ExternalConfig,
    server_urls: Sequence[str] = (),
    config: ClientConfig | None = None,
    *,
    version: PolicyVersion | None = None,
) -> InferenceClient:
    """Return a client, not yet started, for `inference.base_url` or for the servers that were started for the run.

    `version` names the initial weights of engines without versions of their own (vLLM).
    """
    if isinstance(inference, ExternalConfig):
        if server_urls:
            raise ConfigInvalid(f"inference.base_url names the servers, and yet {', '.join(server_urls)} was started")
        return InferenceClient(inference.base_url, config, version=version)
    return InferenceClient(server_urls, config, version=version)
