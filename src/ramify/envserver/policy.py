"""The policy that the agents of a worker call."""

import asyncio
import contextlib
import os
import time

from ramify.envserver.config import EnvServerConfig
from ramify.gateway.policy import Policy
from ramify.gateway.policy_connection import connect_policy
from ramify.wire.address import is_listening

POLL_INTERVAL = 0.05  # seconds between two checks for an engine that does not listen yet


async def open_policy(config: EnvServerConfig, stack: contextlib.AsyncExitStack) -> Policy:
    """Return the policy, open until the stack is closed. Waits for engines up to half of `worker_startup_timeout`."""
    deadline = time.monotonic() + config.worker_startup_timeout / 2
    for url in config.inference.base_url:
        while not await is_listening(url) and time.monotonic() < deadline:
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
    )
