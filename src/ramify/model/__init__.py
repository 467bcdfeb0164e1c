"""Models: resolving, loading, attention for engine and trainer, publishing and applying weights.

A model is an ordinary Hugging Face directory, run by its own code. Ramify adds attention functions, which transformers
lets it register, and a manifest that gives a set of weights a version. Names are imported when they are used: resolving
a model or reading a version needs no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
