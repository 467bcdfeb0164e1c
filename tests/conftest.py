"""Two sizes of every property: `bounded` for each change, deterministic; `full` (RAMIFY_FULL=1) for a long search."""

import os
import subprocess

import pytest
from hypothesis import HealthCheck, settings

# Slow data generation is judged by the clock, so that check would make the outcome depend on the machine.
TIME_DEPENDENT_CHECKS = [HealthCheck.too_slow]

settings.register_profile(
    "bounded", max_examples=50, deadline=None, derandomize=True, suppress_health_check=TIME_DEPENDENT_CHECKS
)
settings.register_profile(
    "full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=TIME_DEPENDENT_CHECKS
)
settings.load_profile("full" if os.environ.get("RAMIFY_FULL") else "bounded")

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test downloads a model


@pytest.fixture
def small_disk(request, tmp_path):
    """A file system of three megabytes, or of what `@pytest.mark.megabytes` says."""
    size = request.node.get_closest_marker("megabytes")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size.args[0] if size else 3}m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
