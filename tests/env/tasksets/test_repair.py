"""repair: real bugs, and tests in a fresh sandbox that no trick passes."""

import asyncio
import json
from collections import Counter
from functools import cache

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env.plugin import build_plugin
from ramify.env.tasksets.repair import (
    Repair,
    RepairConfig,
    find_failed_cases,
    load_bugs,
    load_cases,
    load_sources,
    parse_reports,
)
from ramify.env.tasksets.repair.case_caller import call_case
from ramify.env.tasksets.splits import assign_split
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.validation import ScriptedPolicy
from tests.rollout.runtime.conftest import skip_unless_available
from tests.support.sandbox_agent import work
from tests.support.scripted_agent import get_texts, make_tool_call
from tools.repair.__main__ import load_source

TASK = next(iter(Repair().load()))
FILE, GOLD = TASK.file, load_sources()[TASK.module]
TASKSET = {"id": "repair", "timeout": 3}
ALL_TASKS = [task for split in ("train", "eval") for task in Repair(RepairConfig(split=split)).load()]
FUNCTIONS = sorted({case["function"] for case in load_cases()[TASK.module]})


@cache
def find_failures(module: str, source: str) -> list[str]:
    loaded, cases = load_source(module, source), load_cases()[module]
    return [case["id"] for case in cases if call_case(loaded, json.loads(json.dumps(case))) != case["expected"]]


def define_all(body: str, head: str = "") -> str:
    """A module whose functions all have the same body."""
    return head + "\n".join(f"def {function}(*args):\n    {body}" for function in FUNCTIONS)


def test_there_are_at_least_a_hundred_tasks_of_every_kind_of_bug():
    assert len(load_bugs()) == len(ALL_TASKS) >= 100
    assert len({task.identity for task in ALL_TASKS}) == len(ALL_TASKS)
    kinds = {"comparison", "off_by_one", "boolean", "arithmetic", "condition", "slice", "call", "statement", "return"}
    assert kinds <= set(Counter(task.operator for task in ALL_TASKS))


def test_splits_have_different_modules():
    train, held = ({task.module for task in Repair(RepairConfig(split=split)).load()} for split in ("train", "eval"))
    assert train and held and not train & held


def test_no_task_is_solved_by_an_empty_change():
    unsolved = [task for task in ALL_TASKS if len(find_failures(task.module, task.source)) >= 3]
    assert len(unsolved) == len(ALL_TASKS)


def test_the_gold_file_solves_every_task():
    assert all(not find_failures(module, load_sources()[module]) for module in load_cases())


def test_prompt_shows_fewer_examples_than_there_are_failures():
    for task in ALL_TASKS:
        examples = [line for line in task.prompt.splitlines() if line.startswith("- ")]
        assert 1 <= len(examples) < len(find_failures(task.module, task.source))


def test_seed_sets_the_order_and_num_tasks_takes_a_prefix():
    first = list(Repair(RepairConfig(num_tasks=5)).load())
    assert list(Repair(RepairConfig(num_tasks=9)).load())[:5] == first
    assert list(Repair(RepairConfig(num_tasks=5, seed=1)).load()) != first
    with pytest.raises(ConfigInvalid, match="num_tasks is 5000"):
        list(Repair(RepairConfig(num_tasks=5000)).load())


def test_tasks_survive_serialization():
    assert [Repair.task_type.from_wire(task.to_wire()) for task in ALL_TASKS] == ALL_TASKS


@pytest.mark.process
async def test_gold_file_scores_one_and_empty_change_zero(sandbox_kind):
    solved = await work(TASKSET, kind=sandbox_kind, files={FILE: GOLD})
    assert (solved.reward, solved.metrics["passed_tests"], solved.errors) == (1.0, 1.0, [])
    unchanged = await work(TASKSET, kind=sandbox_kind)
    assert unchanged.reward == 0.0 and 0 < unchanged.metrics["passed_tests"] < 1


ALWAYS_EQUAL = """
class Always(str):
    __slots__ = ()
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__

class Anything:
    def __eq__(self, other):
        return True

"""
FORGED = """
import json, os
for id in ["IDS"]:
    line = json.dumps({"nonce": "0" * 32, "id": id, "result": {"value": None}}) + "\\n"
    print(line)
    for path in (f"/proc/{os.getppid()}/fd/1", "/proc/self/fd/1"):
        try:
            with open(path, "w") as file:
                file.write(line)
        except OSError:
            pass

""".replace('"IDS"', ", ".join(repr(case["id"]) for case in load_cases()[TASK.module]))

ATTACKS = {
    "exit": {FILE: "import os\nos._exit(0)\n"},
    "exit in a call": {FILE: define_all("os._exit(0)", "import os\n")},
    "exit by SystemExit": {FILE: "raise SystemExit(0)\n"},
    "conftest": {
        FILE: TASK.source,
        "conftest.py": "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n",
    },
    "patched pytest": {
        FILE: TASK.source,
        "pytest.py": "print('all passed')\nraise SystemExit(0)\n",
        "json.py": "def dumps(*a, **k): return 'null'\ndef loads(*a): return {}\n",
        "sitecustomize.py": "import os\nos._exit(0)\n",
        "case_caller.py": "",
    },
    "equal to everything": {FILE: define_all("return Anything()", ALWAYS_EQUAL)},
    "text equal to everything": {FILE: define_all("return Always('x')", ALWAYS_EQUAL)},
    "forged lines": {FILE: define_all("return None", FORGED)},
    "patched json": {FILE: define_all("return 0", "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\n")},
    "dead runner": {FILE: define_all("return 0", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")},
    "endless": {FILE: "while True:\n    pass\n"},
    "no file": {FILE: ""},
}


@pytest.mark.process
@pytest.mark.parametrize("attack", ATTACKS)
async def test_trick_does_not_pass_the_tests(attack):
    trace = await work(TASKSET | {"timeout": 1}, files=ATTACKS[attack])
    assert trace.reward == 0.0
    assert not trace.errors


@pytest.mark.process
@pytest.mark.parametrize("command", ["rm -f *", "ln -sf /etc/passwd {}", "rm {0}; mkdir {0}"])
async def test_file_that_is_no_file_scores_zero(command):
    trace = await work(TASKSET, command=command.format(FILE))
    assert trace.reward == 0.0 and not trace.errors
    assert FILE in trace.info["outputs"] or command.endswith("mkdir {0}")  # a directory is copied


@pytest.mark.process
async def test_sandbox_that_its_file_ends_scores_zero():
    skip_unless_available("sandbox")
    trace = await work(TASKSET, kind="sandbox", files={FILE: "import os\nos.kill(-1, 9)\n"})
    assert trace.reward == 0.0


@pytest.mark.process
async def test_sandbox_of_the_agent_has_no_tests_no_gold_and_no_generator():
    skip_unless_available("sandbox")
    search = (
        (
            "python3 -c 'import ramify' 2>/dev/null && echo ramify; ls; "
            "find / -xdev ( -name bugs.json -o -name cases.json -o -name mutations.py ) 2>/dev/null | grep -i repair; "
            "grep -rl 'merge_intervals' /sandbox 2>/dev/null"
        )
        .replace("( ", "\\( ")
        .replace(" )", " \\)")
    )
    trace = await work(TASKSET, kind="sandbox", command=search)
    listed = trace.info["command"][1].split()
    assert [name for name in listed if not name.endswith(FILE)] == []


def test_only_reports_with_the_nonce_count():
    lines = [
        '{"nonce": "b", "id": "x", "result": 1}',
        "noise",
        "[]",
        '{"nonce": "a", "id": "x", "result": {"value": 1}}',
    ]
    assert parse_reports("\n".join(lines), "a") == {"x": [{"value": 1}]}


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ([], "not reported"),
        ([{"value": 1}, {"value": 1}], "reported more than once"),
        ([{"value": True}], "wrong result"),
        ([{"value": 1.0}], "wrong result"),
        ([{"raises": "ValueError"}], "wrong result"),
        ([None], "wrong result"),
        ([{"value": 1}], None),
    ],
)
def test_case_passes_only_with_exactly_the_expected_result(reported, reason):
    failed = find_failed_cases([{"id": "x", "expected": {"value": 1}}], {"x": reported})
    assert failed.get("x") == reason


async def test_isolation_is_required_on_request():
    task = next(iter(build_plugin("taskset", {"id": "repair", "requires": ["isolation"]}).load()))
    assert task.requires == ("isolation",)
    with pytest.raises(ConfigInvalid, match="isolation"):
        await work(TASKSET | {"requires": ["isolation"]})


@pytest.mark.process
async def test_agent_with_a_shell_repairs_the_module():
    """The harness `bash` with scripted replies: the model reads the file, edits it and says so."""
    skip_unless_available("sandbox")
    bug = next(bug for bug in load_bugs() if bug["text"] == "<" and bug["operator"] == "comparison")
    taskset = {"id": "repair", "split": assign_split(bug["module"]), "timeout": 3}
    source = SourceConfig(taskset=taskset, harness={"id": "bash"}, runtime={"id": "sandbox", "num_prepared": 0})
    env, gold = Environment.load(source), load_sources()[bug["module"]]
    buggy = gold[: bug["start"]] + bug["text"] + gold[bug["stop"] :]
    task = next(task for task in env.iter_tasks() if task.source == buggy)
    line = bug["line"] - 1
    edit = {"path": task.file, "old": buggy.splitlines()[line], "new": gold.splitlines()[line]}
    replies = [make_tool_call("bash", command=f"cat {task.file}"), make_tool_call("edit_file", **edit), "Fixed."]
    policy = ScriptedPolicy(replies)
    (trace,) = (await asyncio.wait_for(run_attempt(env, task, policy=policy, id="r1"), 60)).traces
    assert (trace.reward, trace.errors) == (1.0, [])
    assert buggy.splitlines()[line] in get_texts(trace, "tool")[0]
