"""Render messages to token ids and parse sampled ids to messages, turn by turn, without tokenizing anything twice.

`load_renderer` returns the `Renderer` of a model directory. It needs `tokenizers` and `jinja2`, never torch. Names are
imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
