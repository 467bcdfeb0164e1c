"""The trace: a rollout as a tree of messages, and the forest of token trees that is trained.

A `Trace` records what was sampled; `build_forest`, `split_forest`, `pack_trees` and `balance_packs` turn traces into
the packs that a trainer computes. Requires only numpy and msgspec.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
