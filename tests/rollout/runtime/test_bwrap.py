"""Why bubblewrap cannot make a sandbox, from what a program of this name prints."""

import os
from pathlib import Path

import pytest

from ramify.rollout.runtime.bwrap import find_unsupported_reason

pytestmark = pytest.mark.process


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Return the reason for a program with these lines."""

    def find_reason(*lines: str) -> str | None:
        (tmp_path / "bwrap").write_text("\n".join([*lines, ""]))
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        find_unsupported_reason.cache_clear()
        return find_unsupported_reason()

    yield find_reason
    find_unsupported_reason.cache_clear()


def test_a_program_that_may_not_be_executed_is_not_a_lack_of_namespaces(probe, tmp_path: Path):
    reason = probe(f"#!{tmp_path}")  # a directory cannot be executed, not even by root
    assert reason == f"{tmp_path}/bwrap cannot be started: Permission denied"


def test_all_lines_of_its_message_are_read_and_shown(probe):
    reason = probe("#!/bin/sh", "echo 'No permissions to create new namespace' >&2; echo 'see the manual' >&2; exit 1")
    assert reason.startswith("this user may not create namespaces: No permissions to create new namespace\nsee the")


def test_a_message_without_a_known_cause_is_shown(probe):
    assert probe("#!/bin/sh", "echo 'not today' >&2; exit 1") == "bwrap fails: not today"
