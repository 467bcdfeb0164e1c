from .config import EvalConfig as EvalConfig
from .run import Result as Result
from .run import evaluate as evaluate
