"""`--help` explains the kinds of plugins, and the options of one."""

import pytest

from ramify.cli import main
from ramify.env.plugin import PLUGIN_KINDS


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_help_for_a_kind_lists_its_plugins(kind, capsys):
    assert main(["rl", "--help", kind]) == 0
    output = capsys.readouterr().out
    assert [id for id in PLUGIN_KINDS[kind].builtin_paths if f"\n  {id} " not in output] == []
    assert f"'ramify rl --help {kind}.ID' prints the options" in output


def test_help_for_a_plugin_prints_its_options(capsys):
    assert main(["eval", "-h", "taskset.reverse-text"]) == 0
    output = capsys.readouterr().out
    assert "taskset 'reverse-text': Reverse a string" in output and "--taskset.max_chars INT" in output
    assert main(["rl", "--help", "judge.relativ"]) == 2
    assert "did you mean 'relative'?" in capsys.readouterr().err
