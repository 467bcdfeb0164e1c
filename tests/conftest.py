"""Two sizes of every property: `bounded` for each change, deterministic; `full` (RAMIFY_FULL=1) for the long hunt."""

import os

from hypothesis import HealthCheck, settings

# Slow data generation is judged by the clock, so that check would make the outcome depend on the machine.
CLOCK = [HealthCheck.too_slow]

settings.register_profile("bounded", max_examples=50, deadline=None, derandomize=True, suppress_health_check=CLOCK)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=CLOCK)
settings.load_profile("full" if os.environ.get("RAMIFY_FULL") else "bounded")
