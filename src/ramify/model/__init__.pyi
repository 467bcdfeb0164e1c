from .load import LoadedModel as LoadedModel
from .weights_manifest import Manifest as Manifest
from .weights import publish_weights as publish_weights
