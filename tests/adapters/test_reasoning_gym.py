"""The adapter of reasoning-gym, without the package. `make test-envs` runs it with the package."""

import sys
from pathlib import Path

import pytest

from ramify.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig
from ramify.adapters.reasoning_gym.refusals import REFUSALS
from ramify.errors import ConfigInvalid

PAGE = Path(__file__).parents[2] / "docs" / "reasoning-gym.md"


def test_missing_package_is_one_line_with_venv_and_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigInvalid) as error:
        ReasoningGym(ReasoningGymConfig(dataset="spell_backward"))
    assert error.value.message.startswith(f"{sys.prefix} lacks the package reasoning-gym; ")
    assert "\n" not in error.value.message


def test_page_lists_every_refused_dataset_with_its_reason():
    page = PAGE.read_text()
    assert [name for name, reason in REFUSALS.items() if f"| `{name}` | {reason} |" not in page] == []
