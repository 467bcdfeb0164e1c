from .plan import Plan as Plan
from .plan import plan_of as plan_of
from .process import Entry as Entry
from .process import Role as Role
from .run import rl as rl
from .supervisor import Outcome as Outcome
from .supervisor import Supervisor as Supervisor
