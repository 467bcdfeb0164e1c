"""The policy that the agents of a worker call."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence

from ramify.infer.client import InferenceClient
from ramify.infer.gateway.policy import ChatPolicy, Policy, TokenPolicy
from ramify.infer.gateway.policy_connection import connect_policy
from ramify.processes.wire.address import is_listening
from ramify.rollout.envserver.config import EnvServerConfig

POLL_INTERVAL = 0.05  # seconds between two checks for an engine that does not listen yet


async def open_policy(config: EnvServerConfig, stack: contextlib.AsyncExitStack) -> Policy:
    """Return the policy, open until the stack is closed. Waits for an engine up to half of `worker_startup_timeout`."""
    deadline = time.monotonic() + config.worker_startup_timeout / 2
    while not await _is_any_listening(config.inference.base_url) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL)
    key = os.environ.get(config.api_key_env, "")
    return await connect_policy(
        config.inference.base_url,
        config.model.name,
        config.renderer,
        stack,
        client_mode=config.client_type,
        served_model=config.served_model,
        api_key=key,
        retries=config.select_source().config.model_retries,
    )


async def _is_any_listening(urls: Sequence[str]) -> bool:
    return any(await asyncio.gather(*map(is_listening, urls)))


def set_policy_urls(policy: Policy, urls: Sequence[str]) -> None:
    """Let the policy sample from the servers at these addresses from now on."""
    if isinstance(policy, TokenPolicy) and isinstance(policy.client, InferenceClient):
        policy.client.set_urls(urls)
    elif isinstance(policy, ChatPolicy) and urls:
        policy.set_base_url(f"{urls[0]}/v1")
