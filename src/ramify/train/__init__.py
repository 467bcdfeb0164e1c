"""The trainer: forests in, gradients, new weights and metrics out.

It knows tokens, weights and components, not algorithms. N_c travels with the batch and gradients are summed, so the
result of a step does not depend on how the batch was packed or split across ranks. Names are imported on first use: the
configuration and the losses need no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
