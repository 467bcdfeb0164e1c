"""The gateway: records every model call of a rollout, in process or over HTTP, with its exact tokens.

A `RolloutSession` records the calls of one rollout; a `Policy` samples the replies; a `Gateway` serves sessions over
HTTP to any OpenAI or Anthropic client. Names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
