"""Sessions of a gateway with a scripted client."""

from typing import Any

from ramify.gateway import ModelRequest, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Message, Trace
from tests.support.engine import TINY, Script, ScriptedClient


def make_session(
    script: Script, *, renderer=TINY, limits: dict[str, int] | None = None, **options: Any
) -> tuple[RolloutSession, ScriptedClient]:
    token_client = ScriptedClient(script, renderer)
    sampling = options.pop("sampling", SamplingConfig())
    policy = TokenPolicy(token_client, renderer, "tiny", max_model_len=options.pop("max_model_len", None))
    session = RolloutSession(
        Trace(id="t1"), policy, sampling=sampling, limits=RolloutLimits(**(limits or {})), **options
    )
    return session, token_client


def user_request(text: str, **fields: Any) -> ModelRequest:
    return ModelRequest((Message("user", text),), **fields)
