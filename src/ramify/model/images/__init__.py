"""Images: decode and check their bytes, turn them into a model's inputs, and keep them in the run directory.

Everything here is NumPy and Pillow, without torch or transformers, so that an env worker can process images. Names are
imported on first use, and Pillow only when an image is decoded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
