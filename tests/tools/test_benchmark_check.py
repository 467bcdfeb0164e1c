"""What the benchmarks share: how they run competitors."""

import pytest

pytestmark = pytest.mark.process

INTERPRETER = """#!/bin/sh
case $4 in
    8) echo "a traceback" >&2; echo "out of memory" >&2; exit 1 ;;
    4) exit 1 ;;
esac
echo "{\\"step_s\\": 0.$4}"
"""


def test_a_failed_micro_batch_says_why_and_the_fastest_of_the_others_counts(load_benchmark, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    assert load_benchmark("_check").measure_trl(str(python), "grpo", tmp_path, [8, 4, 2, 1]) == 0.1
    assert capsys.readouterr().out.splitlines() == [
        "TRL's grpo with a micro-batch of 8: failed: out of memory",
        "TRL's grpo with a micro-batch of 4: failed: nothing on stderr",
        "TRL's grpo with a micro-batch of 2: 0.2 s a step",
        "TRL's grpo with a micro-batch of 1: 0.1 s a step",
    ]
