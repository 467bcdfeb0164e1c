from .config import EvalConfig as EvalConfig
from .run import EvalResult as EvalResult
from .run import evaluate as evaluate
