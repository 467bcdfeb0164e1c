from .api import rl as rl
from .plan import LaunchPlan as LaunchPlan
from .plan import build_plan as build_plan
from .process import ProcessRole as ProcessRole
from .process import ProcessSpec as ProcessSpec
from .supervisor import RunOutcome as RunOutcome
from .supervisor import Supervisor as Supervisor
