"""The adapter of TextArena, without the package. `make test-envs` runs it with the package."""

import sys

import pytest

from ramify.adapters.textarena import TextArena, TextArenaConfig, _format_observation
from ramify.errors import ConfigInvalid


def test_missing_package_is_one_line_with_venv_and_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigInvalid) as error:
        TextArena(TextArenaConfig(game="TicTacToe-v0"))
    assert error.value.message.startswith(f"{sys.prefix} lacks the package textarena; ")
    assert "\n" not in error.value.message


def test_player_is_not_shown_its_own_moves():
    observation = [(-1, "You are player 0.", 0), (0, "[4]", 2), (1, "[5]", 2), (-1, "The board", 3)]
    assert _format_observation(observation, 0) == "You are player 0.\n\n[5]\n\nThe board"
