"""Messages to token ids, sampled ids to messages, one turn after another without tokenizing anything twice.

`load_renderer` gives the `Renderer` of a model directory. It needs `tokenizers` and `jinja2`, never torch. A name is
loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
