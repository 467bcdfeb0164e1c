"""Whom the agents of a worker ask."""

import contextlib
import os

from ramify.envserver.config import EnvServerConfig
from ramify.gateway.policy import Policy
from ramify.gateway.reaching import reach


async def open_policy(config: EnvServerConfig, stack: contextlib.AsyncExitStack) -> Policy:
    """The policy, open until the stack is closed."""
    key = os.environ.get(config.api_key_env, "")
    return await reach(config.inference.base_url, config.model.name, config.renderer, stack, how=config.client, key=key)
