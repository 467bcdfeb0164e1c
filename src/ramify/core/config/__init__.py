"""Configuration: typed models, filled from defaults, then `@ file.toml` from left to right, then flags.

One idea: all three are layers of one plain table, which is validated once, when it is complete. So a flag can set
whatever a file can set (entries of lists, variants, plugin tables), and one error lists all wrong keys and values.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
