from .config import Config as Config
from .env import Endpoint as Endpoint
from .env import Judge as Judge
from .env import Runtime as Runtime
from .env import Task as Task
from .env import Taskset as Taskset
from .env import TasksetConfig as TasksetConfig
from .env import User as User
from .env import group_reward as group_reward
from .env import metric as metric
from .env import reward as reward
from .env import stop as stop
from .env import tool as tool
from .env.judge import RubricJudge as RubricJudge
from .env.user import ModelUser as ModelUser
from .evals import evaluate as evaluate
from .harness import Harness as Harness
from .launch import rl as rl
from .orchestrate.algorithms import Algorithm as Algorithm
from .trace import Branch as Branch
from .trace import Message as Message
from .trace import ToolCall as ToolCall
from .trace import Trace as Trace
from .train.sft import sft as sft

__version__: str
