"""The tests in `cuda_kernels.py` and of the fused AdamW: on a GPU here, otherwise where Triton interprets the kernels.

Triton decides when it is imported, so the interpreter needs a process of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.scheduling import HAS_GPU

pytestmark = pytest.mark.process


def has_cuda() -> bool:
    """Return whether torch can use a GPU; without one torch is not imported, which takes seconds."""
    if not HAS_GPU:
        return False
    import torch

    return torch.cuda.is_available()


if has_cuda():
    from tests.model.kernels.cuda_kernels import *  # noqa: F403 - the tests
else:

    def test_kernels_in_the_interpreter():
        if find_spec("triton") is None:
            pytest.skip("needs Triton")
        scripts = [Path(__file__).with_name("cuda_kernels.py"), Path(__file__).parents[2] / "train/test_fused_adamw.py"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *map(str, scripts)]
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        is_full = bool(os.environ.get("RAMIFY_FULL"))
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900 if is_full else 300)
        assert result.returncode == 0, result.stdout + result.stderr
        num_passed = 92 if is_full else 53
        assert f"{num_passed} passed" in result.stdout
