from .config import EvalConfig as EvalConfig
from .run import evaluate as evaluate
