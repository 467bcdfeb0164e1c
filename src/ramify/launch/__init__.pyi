from .launcher import ProcessRole as ProcessRole
from .launcher import ProcessSpec as ProcessSpec
from .plan import LaunchPlan as LaunchPlan
from .plan import build_plan as build_plan
from .python_api import rl as rl
from .python_api import sft as sft
from .supervisor import RunOutcome as RunOutcome
from .supervisor import Supervisor as Supervisor
