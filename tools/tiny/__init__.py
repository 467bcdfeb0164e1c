"""How the model that ships with the package is made: what it is taught, in which stages, and what it can do then.

The idea: a policy that already writes every format and has hardly any skill, so that a few minutes of reinforcement
learning on a laptop have something to show. `tiny` is small enough to be built anew whenever the recipe changes.
"""

RECIPE_VERSION = 3  # raised whenever the same seed gives another model
MODEL_INFO_FILE = "ramify.json"  # beside the model: its seed, this version, the day, and what was measured
