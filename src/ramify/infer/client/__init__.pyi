from .client import InferenceClient as InferenceClient
from .completion import ClientSampling as ClientSampling
from .completion import Completion as Completion
from .config import ClientConfig as ClientConfig
