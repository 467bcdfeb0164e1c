"""Adapters without their packages; `make test-envs` runs them with the packages."""

import sys
from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env.adapters.reasoning_gym import REFUSALS, ReasoningGym, ReasoningGymConfig
from ramify.env.adapters.textarena import TextArena, TextArenaConfig, _format_observation
from ramify.env.adapters.verifiers import Verifiers, VerifiersConfig

PAGE = Path(__file__).parents[3] / "docs" / "other-environments.md"


@pytest.mark.parametrize(
    ("package", "taskset", "config"),
    [
        ("reasoning-gym", ReasoningGym, ReasoningGymConfig(dataset="spell_backward")),
        ("textarena", TextArena, TextArenaConfig(game="TicTacToe-v0")),
        ("verifiers", Verifiers, VerifiersConfig(env="wordle")),
    ],
)
def test_missing_package_is_one_line_with_venv_and_package(monkeypatch, package, taskset, config):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(ConfigInvalid) as error:
        taskset(config)
    assert error.value.message.startswith(f"{sys.prefix} lacks the package {package}; ")
    assert "\n" not in error.value.message


def test_page_lists_every_refused_dataset_with_its_reason():
    page = PAGE.read_text()
    assert [name for name, reason in REFUSALS.items() if f"| `{name}` | {reason} |" not in page] == []


def test_player_is_not_shown_its_own_moves():
    observation = [(-1, "You are player 0.", 0), (0, "[4]", 2), (1, "[5]", 2), (-1, "The board", 3)]
    assert _format_observation(observation, 0) == "You are player 0.\n\n[5]\n\nThe board"
