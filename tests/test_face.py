"""`import ramify` offers the public API and loads only what is used."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import ramify


def test_the_version_is_that_of_the_distribution():
    assert ramify.__version__ == version("ramify")


@pytest.mark.parametrize("name", ramify.__all__)
def test_every_public_name_can_be_used(name):
    assert getattr(ramify, name) is not None
    assert name in dir(ramify)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Rollout"):
        ramify.Rollout  # noqa: B018


@pytest.mark.process
def test_importing_ramify_loads_no_other_package():
    script = "import sys; before = set(sys.modules); import ramify; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    packages = {name.split(".")[0] for name in loaded.stdout.split()}
    assert packages - set(sys.stdlib_module_names) == {"ramify", "lazy_loader"}


def test_the_public_api_has_what_environments_need():
    assert set(ramify.__all__) >= {
        *("Task", "Taskset", "TasksetConfig", "Harness", "Runtime", "Trace", "User", "Judge", "Endpoint"),
        *("reward", "metric", "group_reward", "turn_reward", "stop", "tool"),
        *("Branch", "Message", "ToolCall", "ModelUser", "Algorithm", "evaluate", "rl", "sft"),
    }


@pytest.mark.process
def test_writing_an_environment_loads_no_heavy_library():
    names = sorted(set(ramify.__all__) - {"evaluate", "rl", "sft", "LLM", "Sample", "load_policy"})
    script = f"import sys, ramify; [getattr(ramify, name) for name in {names}]; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    packages = {name.split(".")[0] for name in loaded.stdout.split()}
    assert not packages & {"torch", "transformers", "tokenizers", "aiohttp", "mcp", "starlette", "uvicorn", "rich"}
