"""Inference: an engine on plain PyTorch and Hugging Face models with an HTTP server in front of it, or vLLM as a child.

`config` describes both without torch; `engine` runs the model in a thread of its own; `server` speaks HTTP.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
