"""The client of inference servers: it sends prompts as token ids and returns sampled ids with their logprobs.

One idea: callers need not know how many servers there are, which engine they run, or which of them are down. The client
chooses the server, keeps a session where its prefix is cached, sends no request twice that may have been sampled, and
knows for every token which version of the weights it came from. Nothing here imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
