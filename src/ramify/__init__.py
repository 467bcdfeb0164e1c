"""Ramify: reinforcement learning for language-model agents, where a rollout stays a tree until the gradient.

This is the public API. A name is loaded when it is first used, so `import ramify` is fast, and a worker that never
trains does not load the training code.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
