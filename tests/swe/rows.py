"""Rows of R2E-Gym, SWE-bench and Scale-SWE about the same bug, with the columns that the datasets have."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.swe.image import BASE, BASE_IMAGE, FIX, R2E_IMAGE, TEST_FILE, run_git

SHAPES = ("r2e-gym", "swe-bench", "scale-swe")
ISSUE = """pluralize() gets two nouns wrong

inflection.pluralize("human") returns "humen" and not "humans", and inflection.pluralize("potato") returns "potatos" and
not "potatoes". The singular of "humans" should still be "human"."""
FAILING = [f"{TEST_FILE}::test_pluralize_singular[{name}]" for name in ("potato-potatoes", "human-humans")]
PASSED_LINE = re.compile(r"^PASSED (\S+)$", re.MULTILINE)
TEST_DEADLINE = 120  # seconds


def write_rows(engine: str, engine_args: list[str], repository: Path, folder: Path) -> dict[str, Path]:
    """Write one file of rows for each shape; return them by shape."""
    passing = [id for id in list_passing(engine, engine_args, repository) if id not in FAILING]
    gold = run_git(repository, "diff", BASE, FIX, "--", "inflection.py", "CHANGES.rst")
    tests = run_git(repository, "diff", BASE, FIX, "--", TEST_FILE)
    rows = {
        "r2e-gym": build_r2e_row(repository, passing),
        "swe-bench": build_swe_bench_row(repository, gold, tests, passing),
        "scale-swe": build_scale_swe_row(gold, tests, passing),
    }
    files = {shape: folder / f"{shape}.jsonl" for shape in SHAPES}
    for shape, row in rows.items():
        files[shape].write_text(json.dumps(row) + "\n")
    return files


def list_passing(engine: str, engine_args: list[str], repository: Path) -> list[str]:
    """Return the ids of the tests that pass after the fix, as pytest of the image prints them."""
    fix = run_git(repository, "diff", BASE, FIX, "--", "inflection.py", TEST_FILE)
    script = "cd /testbed && git apply - && .venv/bin/python -m pytest -q -rp -p no:cacheprovider " + TEST_FILE
    command = [engine, "run", "--rm", "-i", "--network", "none", *engine_args, BASE_IMAGE, "sh", "-c", script]
    output = subprocess.run(command, input=fix, check=True, stdout=subprocess.PIPE, text=True, timeout=TEST_DEADLINE)
    passing = PASSED_LINE.findall(output.stdout)
    assert set(FAILING) <= set(passing) and len(passing) > 400, passing
    return passing


def build_r2e_row(repository: Path, passing: list[str]) -> dict[str, Any]:
    """Return a row of R2E-Gym; the names of its tests have no file."""
    names = [id.partition("::")[2].replace("::", ".") for id in (*passing, *FAILING)]
    old, new = (run_git(repository, "show", f"{commit}:inflection.py") for commit in (BASE, FIX))
    return {
        "repo_name": "inflection",
        "docker_image": R2E_IMAGE,
        "commit_hash": run_git(repository, "rev-parse", FIX).strip(),
        "problem_statement": f"[ISSUE]\n{ISSUE}\n[/ISSUE]",
        "expected_output_json": json.dumps(dict.fromkeys(names, "PASSED")),
        "modified_files": ["inflection.py"],
        "parsed_commit_content": json.dumps({"file_diffs": [parse_change(repository, old, new)]}),
    }


def parse_change(repository: Path, old: str, new: str) -> dict[str, Any]:
    """Return the change of inflection.py as R2E-Gym stores it."""
    kinds = {" ": "context", "+": "added", "-": "deleted"}
    hunks: list[dict[str, Any]] = []
    for line in run_git(repository, "diff", BASE, FIX, "--", "inflection.py").splitlines():
        if match := re.match(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@ ?(.*)", line):
            start, length, new_start, new_length = map(int, match.groups()[:4])
            ranges = {
                "old_range": {"start": start, "length": length},
                "new_range": {"start": new_start, "length": new_length},
            }
            hunks.append({"descriptor": {**ranges, "section": match[5]}, "line_group": {"all_lines": []}})
        elif hunks:
            hunks[-1]["line_group"]["all_lines"].append({"type": kinds[line[0]], "content": line[1:]})
    return {
        "old_file_content": old,
        "new_file_content": new,
        "header": {"file": {"path": "inflection.py"}, "misc_line": None},
        "minus_file": {"path": "a/inflection.py"},
        "plus_file": {"path": "b/inflection.py"},
        "hunks": hunks,
    }


def build_swe_bench_row(repository: Path, gold: str, tests: str, passing: list[str]) -> dict[str, Any]:
    """Return a row of SWE-bench. Its image is named as some mirrors of the benchmark do it, by a column."""
    return {
        "instance_id": "jpvanhal__inflection-31",
        "repo": "jpvanhal/inflection",
        "base_commit": run_git(repository, "rev-parse", BASE).strip(),
        "version": "0.3",
        "problem_statement": ISSUE,
        "hints_text": "",
        "patch": gold,
        "test_patch": tests,
        "FAIL_TO_PASS": json.dumps(FAILING),
        "PASS_TO_PASS": json.dumps(passing),
        "image": BASE_IMAGE,
    }


def build_scale_swe_row(gold: str, tests: str, passing: list[str]) -> dict[str, Any]:
    """Return a row of Scale-SWE, with a script of failing tests besides the patch of tests."""
    script = 'import inflection\n\n\ndef test_human():\n    assert inflection.pluralize("human") == "humans"\n'
    return {
        "instance_id": "jpvanhal_inflection_pr31",
        "user": "jpvanhal",
        "repo": "inflection",
        "language": "python",
        "workdir": "/testbed",
        "image_url": BASE_IMAGE,
        "patch": gold,
        "problem_statement": ISSUE,
        "f2p_patch": tests,
        "f2p_script": script,
        "FAIL_TO_PASS": [*FAILING, "test_fail_to_pass.py::test_human"],
        "PASS_TO_PASS": passing,
        "pre_commands": f"git checkout -q {BASE}",
    }
