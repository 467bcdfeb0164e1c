from .load import LoadedModel as LoadedModel
from .manifest import Manifest as Manifest
from .version import Version as Version
from .weights import publish as publish
