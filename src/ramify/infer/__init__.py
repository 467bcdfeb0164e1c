"""Inference: a native engine for Hugging Face models with an HTTP server, or vLLM as a child process.

`config` describes both without torch; `engine` runs the model in a thread of its own; `server` is the HTTP server.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
