from .load import LoadedModel as LoadedModel
from .manifest import Manifest as Manifest
from .version import PolicyVersion as PolicyVersion
from .weights import publish_weights as publish_weights
