from .config import SftConfig as SftConfig
from .run import Result as Result
from .run import sft as sft
from .run import train as train
