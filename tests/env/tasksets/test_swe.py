"""swe: rows of three datasets, the agent's patch, and tests in a fresh sandbox. Directories stand in for images."""

import asyncio
import json
import shutil
import sys

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.env import plugin
from ramify.env.runtime import Capabilities, Capability
from ramify.env.tasksets.swe import COMMAND_TIMEOUT, DIFF_TIMEOUT, _list_protected_files
from ramify.env.tasksets.swe_rows import filter_patch, find_changed_files, parse_row
from ramify.rollout import Environment, SourceConfig
from ramify.rollout.runtime import LocalRuntime
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from ramify.rollout.validation import validate_task
from tests.support.sandbox_agent import work

BUGGY = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
TESTS = """from calc import add


def test_add():
    assert add(2, 3) == 5


def test_zero():
    assert add(0, 0) == 0
"""
GOLD_PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST_PATCH = "diff --git a/tests/test_calc.py b/tests/test_calc.py\nnew file mode 100644\n--- /dev/null\n" + (
    f"+++ b/tests/test_calc.py\n@@ -0,0 +1,{len(TESTS.splitlines())} @@\n"
    + "".join(f"+{line}\n" for line in TESTS.splitlines())
)
SWE_BENCH = {
    "instance_id": "me__calc-1",
    "repo": "me/calc",
    "base_commit": "0" * 40,
    "problem_statement": "add subtracts",
    "patch": GOLD_PATCH,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
    "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_zero"]),
}
SCALE_SWE = {
    "instance_id": "me_calc_pr1",
    "user": "me",
    "repo": "calc",
    "workdir": "/workspace/calc",
    "image_url": "images.example/calc:1",
    "patch": GOLD_PATCH,
    "problem_statement": "add subtracts",
    "f2p_patch": "",
    "f2p_script": TESTS,
    "FAIL_TO_PASS": ["test_fail_to_pass.py::test_add"],
    "PASS_TO_PASS": ["test_fail_to_pass.py::test_zero"],
    "pre_commands": "test -f calc.py",
}
R2E_GYM = {
    "repo_name": "calc",
    "docker_image": "images.example/calc_final:abc",
    "commit_hash": "abc",
    "problem_statement": "[ISSUE]\nadd subtracts\n[/ISSUE]",
    "expected_output_json": json.dumps({"TestAdd.test_add": "PASSED", "test_zero": "PASSED", "test_old": "FAILED"}),
}


class LocalImages(LocalRuntime):
    """A local runtime in which every image is a repository with a bug and a history that contains the fix."""

    @property
    def capabilities(self):
        return Capabilities(super().capabilities.available | {Capability.IMAGES})

    def check_task(self, task):
        super().check_task(task.model_copy(update={"image": None, "workdir": None}))

    async def start(self, task):
        await super().start(task.model_copy(update={"image": None, "workdir": None}))
        await self.write("calc.py", FIXED)
        commit = "git -c user.name=a -c user.email=a@b commit -qam"
        await self.run(f"git init -q . && git add -A && {commit} 'the fix' && git tag future", timeout=20)
        await self.write("calc.py", BUGGY)
        await self.run(f"{commit} 'undo the fix'", timeout=20)


LOCAL_IMAGES = "tests.env.tasksets.test_swe:LocalImages"
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def write_rows(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"id": "swe", "path": str(file), "python": sys.executable, "activate": ""}


async def run_agent(tmp_path, row=SWE_BENCH, **options):
    return await work(write_rows(tmp_path, row), kind=LOCAL_IMAGES, **options)


@pytest.mark.process
@pytest.mark.parametrize("row", [SWE_BENCH, SCALE_SWE], ids=["swe-bench", "scale-swe"])
async def test_fix_scores_one_and_no_change_zero(tmp_path, row):
    solved = await run_agent(tmp_path, row, files={"calc.py": FIXED})
    assert (solved.reward, solved.errors) == (1.0, [])
    assert solved.info["tests"] == {"unpassed": {}, "count": 2, "removed": []}
    if row is SCALE_SWE:  # of SWE_BENCH, the wrong fix below scores 0
        assert (await run_agent(tmp_path, row)).reward == 0.0


def test_limits_of_tests_and_patch_are_within_those_of_their_phases(tmp_path):
    env = Environment.load(SourceConfig(taskset=write_rows(tmp_path, SWE_BENCH), runtime={"id": LOCAL_IMAGES}))
    (task,) = env.iter_tasks()
    assert task.scoring_timeout >= env.taskset.config.test_timeout + COMMAND_TIMEOUT
    assert env.source.timeouts.finalize > DIFF_TIMEOUT


@pytest.mark.process
async def test_wrong_fix_names_the_test(tmp_path):
    trace = await run_agent(tmp_path, files={"calc.py": "def add(a, b):\n    return a * b\n"})
    assert trace.reward == 0.0
    assert trace.info["tests"]["unpassed"] == {"tests/test_calc.py::test_add": "failed"}


@pytest.mark.process
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(SWE_BENCH, id="swe-bench"),
        pytest.param(SCALE_SWE, id="scale-swe", marks=pytest.mark.full("a fix of such a row is scored above")),
    ],
)
async def test_gold_patch_is_valid(tmp_path, row):
    runtime = {"id": LOCAL_IMAGES, "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}  # plugins are slow to import
    source = SourceConfig(taskset=write_rows(tmp_path, row), runtime=runtime)
    env = Environment.load(source)
    result = await asyncio.wait_for(validate_task(env, next(env.iter_tasks())), 60)
    assert (result.problem, result.reward) == (None, 1.0)


@pytest.mark.process
async def test_agent_sees_no_history_and_no_tests(tmp_path):
    commands = ["log --all --oneline", "tag", "stash list", "reflog", "cat-file --batch-all-objects --batch-check"]
    command = "; ".join(f"git {command}" for command in commands) + "; ls -R"
    output = (await run_agent(tmp_path, command=command)).info["command"][1]
    assert "fix" not in output and "future" not in output and "test_calc" not in output
    assert output.splitlines()[0].endswith(" base")
    assert output.count(" blob ") == 1  # the file with its bug; the fixed one is in no object


@pytest.mark.process
async def test_committed_fix_counts(tmp_path):
    command = "sed -i 's/-/+/' calc.py; git -c user.name=a -c user.email=a@b commit -qam fix"
    assert (await run_agent(tmp_path, command=command)).reward == 1.0


ATTACKS = {
    "exit": {"calc.py": "import os\nos._exit(0)\n"},
    "conftest": {"conftest.py": "def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n", "a.txt": "a"},
    "patched outcome of own tests": {
        "tests/test_calc.py": "def test_add(): pass\ndef test_zero(): pass\n",
        "tests/conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
        "    result = yield\n    result.get_result().outcome = 'passed'\n",
        "a.txt": "a",
    },
    "patched pytest": {"pytest.py": "main = lambda args: 0\n", "json.py": "dumps = None\n", "a.txt": "a"},
    "patched function of pytest": {
        "calc.py": "from _pytest.runner import CallInfo\nfrom_call = CallInfo.from_call\n"
        "def passes(func, *args, **kwargs):\n    return from_call(lambda: None, *args, **kwargs)\n"
        "CallInfo.from_call = staticmethod(passes)\ndef add(a, b): return 0\n",
    },
    "settings": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": "", "a.txt": "a"},
}


@pytest.mark.process
@pytest.mark.parametrize("attack", ATTACKS)
async def test_trick_does_not_resolve_the_issue(tmp_path, attack):
    trace = await run_agent(tmp_path, files=ATTACKS[attack])
    assert (trace.reward, trace.errors) == (0.0, [])


@pytest.mark.process
async def test_agent_without_a_repository_scores_zero(tmp_path):
    trace = await run_agent(tmp_path, files={"calc.py": FIXED}, command="rm -rf .git")
    assert trace.reward == 0.0 and "there is no patch" in trace.info["tests"]["problem"]


@pytest.mark.parametrize("kind", ["local", "sandbox"])
async def test_rows_need_a_runtime_with_images(tmp_path, kind):
    if kind == "sandbox" and (reason := find_unsupported_reason()):
        pytest.skip(f"no sandbox here: {reason}")
    with pytest.raises(ConfigInvalid, match=f"image .* needs images of the runtime '{kind}'"):
        await work(write_rows(tmp_path, SWE_BENCH), kind=kind)


def test_row_of_swe_bench():
    row = parse_row(SWE_BENCH)
    assert (row.shape, row.repository, row.workdir) == ("swe-bench", "me/calc", "/testbed")
    assert row.image == "swebench/sweb.eval.x86_64.me_1776_calc-1:latest"
    assert row.test_paths == ("tests/test_calc.py",) and "testbed" in row.activate
    assert parse_row(SWE_BENCH, image_template="x/{instance}").image == "x/me_1776_calc-1"
    assert parse_row(SWE_BENCH | {"image": "y"}).image == "y"


def test_row_of_scale_swe():
    row = parse_row(SCALE_SWE)
    assert (row.shape, row.repository, row.workdir) == ("scale-swe", "me/calc", "/workspace/calc")
    assert row.setup_commands == ("test -f calc.py",) and row.protected_files == {"test_fail_to_pass.py"}


def test_row_of_r2e_gym():
    row = parse_row(R2E_GYM)
    assert (row.shape, row.problem, row.image) == ("r2e-gym", "add subtracts", "images.example/calc_final:abc")
    assert row.expected_tests == ("TestAdd.test_add", "test_zero") and row.other_tests == ("test_old",)
    assert row.name_test("r2e_tests/test_1.py::TestAdd::test_add") == "TestAdd.test_add"
    assert "/r2e_tests" in row.hidden_paths and "parsed_commit.json" in row.hidden_paths and row.gold_patch == ""


def test_commit_of_r2e_gym_becomes_the_gold_patch():
    def describe(path: str) -> dict:
        lines = [("context", "def add(a, b):"), ("deleted", "    return a - b"), ("added", "    return a + b")]
        return {
            "header": {"file": {"path": path}, "misc_line": None},
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "hunks": [
                {
                    "descriptor": {"old_range": {"start": 1, "length": 2}, "new_range": {"start": 1, "length": 2}},
                    "line_group": {"all_lines": [{"type": kind, "content": text} for kind, text in lines]},
                }
            ],
        }

    files = ["calc.py", "tests/helper.py", "pkg/test_calc.py", "calc_test.py", "README.md"]
    commit = json.dumps({"file_diffs": [describe(path) for path in files]})
    assert parse_row(R2E_GYM | {"parsed_commit_content": commit}).gold_patch == GOLD_PATCH


def test_colors_in_the_names_of_tests_are_removed():
    outcomes = json.dumps({"\x1b[1mtest_add\x1b[0m - why": "PASSED"})
    assert parse_row(R2E_GYM | {"expected_output_json": outcomes}).expected_tests == ("test_add",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": 1}, "not of R2E-Gym, SWE-bench or Scale-SWE"),
        ({key: SWE_BENCH[key] for key in SWE_BENCH if key != "patch"}, "me__calc-1 has no column 'patch'"),
        (SWE_BENCH | {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}, "no tests that must pass"),
        (SWE_BENCH | {"FAIL_TO_PASS": '["test_x (a.B)"]'}, "not a test of pytest"),
        (SWE_BENCH | {"FAIL_TO_PASS": '"x"'}, "expected a list"),
    ],
)
def test_row_that_cannot_be_run_is_refused_by_name(row, message):
    with pytest.raises(ConfigInvalid, match=message):
        parse_row(row)


def test_rows_are_selected(tmp_path):
    other = SWE_BENCH | {"instance_id": "b__c-2", "repo": "b/c"}
    unsupported = SWE_BENCH | {"instance_id": "d__e-3", "FAIL_TO_PASS": '["test_x (a.B)"]'}
    table = write_rows(tmp_path, SWE_BENCH, other, unsupported)

    def load(**options):
        return [task.instance for task in plugin.build_plugin("taskset", table | options).load()]

    with pytest.raises(ConfigInvalid, match="d__e-3"):
        load()
    assert load(skip_unsupported=True) == ["me__calc-1", "b__c-2"]
    assert load(num_tasks=1) == ["me__calc-1"]
    assert load(skip_unsupported=True, repositories=["b/*"]) == ["b__c-2"]
    shared = {split: load(skip_unsupported=True, eval_share=0.5, split=split) for split in ("train",)}
    assert set(shared["train"]) <= {"me__calc-1", "b__c-2"}
    with pytest.raises(ConfigInvalid, match="no row"):
        load(skip_unsupported=True, instances=["none"])


def test_patch_keeps_only_changes_to_code():
    def change(name: str, text: str = "") -> str:
        return f"diff --git a/{name} b/{name}\n{text}--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-a\n+diff --git a/x b/x\n"

    names = ["src/a.py", "conftest.py", "a/conftest.py", "setup.cfg", "b.pth", "pytest/c.py", "src/pytest/d.py", "t.py"]
    names += ["evil-1.dist-info/entry_points.txt", "a/b.egg-info/x"]
    patch, removed = filter_patch("".join(map(change, names)), {"t.py"})
    assert find_changed_files(patch) == ["src/a.py", "src/pytest/d.py"]
    assert removed == ["conftest.py", "a/conftest.py", "setup.cfg", "b.pth", "pytest/c.py", "t.py", *names[-2:]]
    moved = "diff --git a/x.py b/conftest.py\nsimilarity index 100%\nrename from x.py\nrename to conftest.py\n"
    assert filter_patch(moved, ())[0] == ""


CONFTEST_HUNK = "--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n-fine\n+evil\n"
NEW_CONFTEST = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+evil\n"
DISGUISED_PATCHES = {
    "another name in the header": f"diff --git a/x.py b/x.py\n{CONFTEST_HUNK}",
    "a second change without a header": "diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n"
    f"@@ -0,0 +1 @@\n+x\n{NEW_CONFTEST}",
}


@pytest.mark.process
@pytest.mark.parametrize("name", DISGUISED_PATCHES)
async def test_patch_that_changes_a_protected_file_under_another_name_is_detected(name):
    async def test():
        runtime = LocalRuntime()
        await runtime.start(rf.Task())
        try:
            await runtime.run("git init -q .", timeout=20)
            patch, _ = filter_patch(DISGUISED_PATCHES[name], ())
            assert "conftest" in patch  # the headers do not show it
            return await _list_protected_files(runtime, patch, parse_row(SWE_BENCH))
        finally:
            await runtime.stop()

    assert await test() == ["conftest.py"]


def test_change_with_a_quoted_name_is_removed():
    change = 'diff --git "a/conf\\164est.py" "b/conf\\164est.py"\n' + CONFTEST_HUNK
    patch, removed = filter_patch(change, ())
    assert patch == "" and len(removed) == 1
