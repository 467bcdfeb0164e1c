"""Connecting a policy to servers: what their model lists say."""

import contextlib

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.infer.gateway.policy_connection import connect_policy
from ramify.model.render.config import TemplateRendererConfig
from tests.support.engine import Exchange, ScriptedEngine


class KeyedEndpoint(ScriptedEngine):
    """An endpoint that answers every request with the status of a missing or wrong API key."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    async def route(self, exchange: Exchange) -> None:
        await exchange.reply({"error": {"message": "wrong key"}}, self.status)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_api_key_names_the_setting_to_change(status):
    with pytest.raises(ConfigInvalid, match=rf"inference.base_url: .*status {status}: wrong key; set api_key_env"):
        async with KeyedEndpoint(status) as endpoint, contextlib.AsyncExitStack() as stack:
            await connect_policy([endpoint.url], "big-model", TemplateRendererConfig(), stack)
