from .config import SftConfig as SftConfig
from .run import SftResult as SftResult
from .run import run_sft as run_sft
