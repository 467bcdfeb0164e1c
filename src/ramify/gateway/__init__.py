"""The gateway: every model call of a rollout, in process or over HTTP, recorded with the tokens it really had.

A `Session` is one rollout's recorder; a `Policy` is who answers; a `Gateway` lets any OpenAI or Anthropic client ask
over HTTP. A name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.gateway.config import Limits as Limits
    from ramify.gateway.config import SamplingConfig as SamplingConfig
    from ramify.gateway.exchange import Reply as Reply
    from ramify.gateway.exchange import Request as Request
    from ramify.gateway.policy import ChatPolicy as ChatPolicy
    from ramify.gateway.policy import Policy as Policy
    from ramify.gateway.policy import Prepared as Prepared
    from ramify.gateway.policy import Sampled as Sampled
    from ramify.gateway.policy import TokenPolicy as TokenPolicy
    from ramify.gateway.server import Gateway as Gateway
    from ramify.gateway.session import Session as Session

_FACE = {
    "ChatPolicy": "policy",
    "Gateway": "server",
    "Limits": "config",
    "Policy": "policy",
    "Prepared": "policy",
    "Reply": "exchange",
    "Request": "exchange",
    "Sampled": "policy",
    "SamplingConfig": "config",
    "Session": "session",
    "TokenPolicy": "policy",
}

__all__ = [
    "ChatPolicy",
    "Gateway",
    "Limits",
    "Policy",
    "Prepared",
    "Reply",
    "Request",
    "Sampled",
    "SamplingConfig",
    "Session",
    "TokenPolicy",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.gateway' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.gateway.{_FACE[name]}"), name)
    globals()[name] = value
    return value
