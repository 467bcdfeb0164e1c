"""The gateway: every model call of a rollout, in process or over HTTP, recorded with the tokens it really had.

A `Session` is one rollout's recorder; a `Policy` is who answers; a `Gateway` lets any OpenAI or Anthropic client ask
over HTTP. A name is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
