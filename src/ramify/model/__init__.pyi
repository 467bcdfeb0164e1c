from .load import LoadedModel as LoadedModel
from .manifest import Manifest as Manifest
from .weights import publish_weights as publish_weights
