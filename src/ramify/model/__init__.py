"""Models: where they are found, how they are loaded, how their attention reads a paged cache, how weights travel.

One idea: a model is an ordinary Hugging Face directory, run by its own code. What Ramify adds is an attention function,
registered where transformers offers a place for it, and a manifest that gives a set of weights a name. Names load when
they are used: resolving a model or reading a version needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
