"""The workflows run make targets that exist, and `tools.workflows` runs their steps."""

import re
import subprocess

import pytest
import yaml

from tools import workflows

MAKEFILE = (workflows.ROOT / "Makefile").read_text()
NAMES = sorted(path.stem for path in workflows.WORKFLOWS.glob("*.yml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_job_has_a_time_limit_and_calls_targets_that_exist(name):
    for job in yaml.safe_load((workflows.WORKFLOWS / f"{name}.yml").read_text())["jobs"].values():
        assert job["timeout-minutes"] <= 240
        for step in job["steps"]:
            for target in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_tests_run_on_every_python_and_on_aarch64():
    matrix = yaml.safe_load((workflows.WORKFLOWS / "ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", (workflows.ROOT / "pyproject.toml").read_text())
    assert any(included["machine"].endswith("-arm") for included in matrix["include"])


def test_matrix_is_expanded_without_machines():
    matrix = {"machine": ["a", "b"], "python": ["1", "2"], "include": [{"machine": "c", "python": "2"}]}
    assert workflows.expand_matrix(matrix) == [{"python": "1"}, {"python": "2"}]
    assert workflows.expand_matrix({}) == [{}]


@pytest.mark.process
def test_steps_of_a_job_are_run_skipped_and_fail(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "repository")], check=True)
    steps = [
        {"uses": "actions/checkout"},
        {"run": "test ${{ matrix.value }} = 7"},
        {"run": "sudo true"},
        {"run": "false"},
        {"run": "true"},
    ]
    results = list(workflows.run_job("job", steps, {"value": "7"}, tmp_path / "repository"))
    assert [result.state for result in results] == ["skipped", "passed", "skipped", "failed", "skipped"]
    assert results[4].detail == "an earlier step failed"


@pytest.mark.process
def test_job_without_its_python_is_skipped(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "repository")], check=True)
    steps = [{"uses": "actions/setup-python", "with": {"python-version": "3.99"}}, {"run": "true"}]
    results = workflows.run_job("job", steps, {}, tmp_path / "repository")
    assert [result.detail for result in results] == ["an action", "Python 3.99 is not installed"]
