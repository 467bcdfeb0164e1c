"""What all tests share: the sizes of properties, the environment of processes, and the plugins of `tests/support`.

Properties have two sizes: `bounded` for each change, deterministic; `full` (RAMIFY_FULL=1) for a long search.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [f"tests.support.{name}" for name in ("tiers", "scheduling", "repeat", "run_limit")]

# Slow data generation is judged by the clock, so that check would make the outcome depend on the machine.
TIME_DEPENDENT_CHECKS = [HealthCheck.too_slow]

settings.register_profile(
    "bounded", max_examples=12, deadline=None, derandomize=True, suppress_health_check=TIME_DEPENDENT_CHECKS
)
settings.register_profile(
    "full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=TIME_DEPENDENT_CHECKS
)
settings.load_profile("full" if os.environ.get("RAMIFY_FULL") else "bounded")

# Hundreds of processes are started. Without bytecode on disk, each would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# `python3` in the commands of tests is this interpreter. The one of pyenv is a script that takes as long as a command.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test downloads a model

# Each process that imports aiohttp, and each client of httpx, parses the certificates that it trusts: 150 take 50 ms.
if not os.environ.get("RAMIFY_FULL"):  # the full tests install packages
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "certificate.pem")

# The models of tests are so small that a second thread mostly waits for the first one, in a loop that takes a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

gc.disable()  # until the tests start: modules are not garbage


def pytest_collection_modifyitems(items):
    """Skip what is marked `full`."""
    for item in items:
        if (mark := item.get_closest_marker("full")) and not os.environ.get("RAMIFY_FULL"):
            reason = mark.args[0] if mark.args else "runs with RAMIFY_FULL=1"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Keep the garbage collector from traversing a million objects of imported modules again and again."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure():
    """Let the collector free the objects of Triton's library, which writes a list of what is left at the exit."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The directory of a finished run of `ramify rl`, shared by all workers: only read it, or copy it first.

    Four steps on reverse-text with `tiny` that alternated sampling and training although the trainer was killed and the
    orchestrator stopped; sources `warm` and `cool` of different temperatures, the eval `held-out`, recorded batches and
    token statistics. Its `rl.toml` is two directories above.
    """
    from tests.support.runs import share_finished_run

    return share_finished_run(tmp_path_factory)


@pytest.fixture
def check_plugins_in_process(monkeypatch):
    """Check the plugin tables of a run without a process, for tests of what is checked, not of where."""
    from ramify.launch import plugin_check

    def check(_python, request):
        return json.loads(json.dumps(plugin_check.check_request(json.loads(json.dumps(request, default=str)))))

    monkeypatch.setattr(plugin_check, "_check_in", check)


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
