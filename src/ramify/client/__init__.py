"""The token-in/token-out client: prompts as ids to one or several inference servers, sampled ids and logprobs back.

One idea: whoever samples should not know how many servers there are, which engine they run, or which of them has just
died. The client picks the server, keeps a session where its prefix is cached, sends nothing twice that may have been
sampled, and knows for every token which weights it came from. Nothing here imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
