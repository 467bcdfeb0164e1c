from .weights import publish_weights as publish_weights
from .weights_manifest import Manifest as Manifest
