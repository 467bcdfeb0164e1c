"""Supervised training on conversations: the same trainer, fed from a dataset in place of rollouts.

An example is a trace and a batch is a forest, so what examples share (a system prompt, a document asked about ten
times) is computed once. Names load when they are used: configuration, data and plan need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
