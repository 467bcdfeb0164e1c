"""Supervised training on conversations: the same trainer, with batches from a dataset in place of rollouts.

An example is a trace and a batch is a forest, so what examples share (a system prompt, a document with ten questions)
is computed once. Names are imported on first use: configuration, data and plan need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
