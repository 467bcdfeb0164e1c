"""harbor: folders of the format are read, run end to end in fresh sandboxes, or refused if they cannot run."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env.plugin import build_plugin
from ramify.env.tasksets.harbor import Harbor, HarborConfig
from ramify.env.tasksets.pytest_reports import find_not_passed, parse_outcomes
from ramify.rollout import Environment, SourceConfig
from ramify.rollout.runtime import LocalRuntime, LocalRuntimeConfig
from ramify.rollout.validation import validate_task
from tests.support.sandbox_agent import work

EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor" / "tasks"
TASKSET = {"id": "harbor", "path": str(EXAMPLES)}
PYTEST = {**TASKSET, "verify": "pytest", "python": sys.executable}
RIGHT = {"counts.txt": "one.txt 3\ntwo.txt 1\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example folder."""
    return Path(shutil.copytree(EXAMPLES / "count-lines", tmp_path / "count-lines"))


def load_one(path: Path, **options):
    (task,) = Harbor(HarborConfig(path=path, **options)).load()
    return task


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


@pytest.mark.process
async def test_folder_without_an_image_runs_end_to_end(sandbox_kind):
    solved = await work(TASKSET, kind=sandbox_kind, command="cat data/one.txt; ls / /sandbox ..", files=RIGHT)
    assert (solved.reward, solved.errors) == (1.0, [])
    output = solved.info["command"][1]
    assert output.startswith("a\nb\nc\n") and "tests" not in output.replace("_tests", "") and "solution" not in output
    assert (await work(TASKSET, kind=sandbox_kind)).reward == 0.0


@pytest.mark.process
async def test_programs_of_the_environment_can_be_run(folder):
    program = folder / "environment" / "hello.sh"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    assert (await work({"id": "harbor", "path": str(folder)}, command="./hello.sh")).info["command"] == [0, "hello\n"]


@pytest.mark.process
async def test_solution_is_the_gold(sandbox_kind):
    env = Environment.load(SourceConfig(taskset=TASKSET, runtime={"id": sandbox_kind, "num_prepared": 0}))
    result = await asyncio.wait_for(validate_task(env, next(env.iter_tasks())), 60)
    assert (result.problem, result.reward, result.has_gold) == (None, 1.0, True)


def test_fields_of_a_task():
    task = load_one(EXAMPLES)
    assert task.prompt.startswith("The directory `data`")
    assert (task.timeout, task.verifier_timeout, task.resources) == (60.0, 30.0, {"memory_mb": 1024.0})
    assert task.scoring_timeout > task.verifier_timeout
    assert (task.image, task.workdir, task.outputs) == (None, None, (".",))
    assert load_one(EXAMPLES, apply_resources=False).resources == {}
    assert load_one(EXAMPLES / "count-lines").name == "count-lines"
    assert Harbor.task_type.from_wire(task.to_wire()) == task


def test_a_task_is_named_by_its_folder():
    assert load_one(EXAMPLES / "count-lines").identity == "count-lines"


def test_a_refused_limit_names_the_key_of_task_toml(folder):
    append(folder / "task.toml", "storage_mb = 512\n")
    with pytest.raises(ConfigInvalid, match=r"disk_mb in the task's resources \(storage_mb of task\.toml\) needs"):
        LocalRuntime(LocalRuntimeConfig()).check_task(load_one(folder))


def test_changed_folder_is_another_task(folder):
    before = load_one(folder).content_digest
    append(folder / "tests" / "expected.txt", "three.txt 0\n")
    assert load_one(folder).content_digest != before


@pytest.mark.parametrize(
    ("setting", "dockerfile", "image", "workdir"),
    [
        ('docker_image = "ubuntu:24.04"\n', None, "ubuntu:24.04", "/app"),
        ('docker_image = "a"\nworkdir = "/work"\n', "FROM b\nWORKDIR /c\n", "a", "/work"),
        ("", "FROM b\nWORKDIR /first\nWORKDIR /srv\n", "harbor/count-lines", "/srv"),
    ],
)
async def test_image_needs_a_runtime_with_images(folder, setting, dockerfile, image, workdir):
    append(folder / "task.toml", setting)
    if dockerfile:
        (folder / "environment" / "Dockerfile").write_text(dockerfile)
    task = load_one(folder)
    assert (task.image, task.workdir) == (image, workdir)
    with pytest.raises(ConfigInvalid, match=f"image '{image}' needs images of the runtime 'local'"):
        await work({"id": "harbor", "path": str(folder)})


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("gpus = 1\n", "environment.gpus"),
        ('os = "windows"\n', "environment.os"),
        ('network_mode = "allowlist"\nallowed_hosts = ["a.org"]\n', "allowlist"),
        ('[[steps]]\nname = "one"\n', "steps"),
        ('[environment.env]\nKEY = "x"\n', "environment.env"),
        ('[verifier.environment]\ndocker_image = "x"\n', "verifier.environment"),
    ],
)
def test_unsupported_key_is_refused_by_name(folder, setting, named):
    append(folder / "task.toml", setting)
    with pytest.raises(ConfigInvalid, match=f"count-lines uses .*{named}"):
        load_one(folder)


def test_several_containers_are_refused(folder):
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ConfigInvalid, match=r"docker-compose\.yaml"):
        load_one(folder)


async def test_task_without_network_requires_a_private_network(folder):
    append(folder / "task.toml", 'network_mode = "no-network"\n')
    assert load_one(folder).requires == ("private_network",)
    with pytest.raises(ConfigInvalid, match="private_network"):
        await work({"id": "harbor", "path": str(folder)})


@pytest.mark.parametrize("memory", ["2G", "2GiB", "2 GB", "2048m"])
def test_older_sizes_are_read(folder, memory):
    text = (folder / "task.toml").read_text().replace("memory_mb = 1024", f'memory = "{memory}"\nstorage = "512M"')
    (folder / "task.toml").write_text(text)
    assert load_one(folder).resources == {"memory_mb": 2048.0, "disk_mb": 512.0}


@pytest.mark.parametrize("setting", ['memory = "lots"', "memory = 2048", 'memory = "2"', 'memory_mb = "2048"'])
def test_size_that_cannot_be_read_is_refused_by_name(folder, setting):
    text = (folder / "task.toml").read_text().replace("memory_mb = 1024", setting)
    (folder / "task.toml").write_text(text)
    with pytest.raises(ConfigInvalid, match=rf"environment\.{setting.split()[0]} = .*; expected a"):
        load_one(folder)


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("exit 0", 0.0),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 3", 0.5),
        ('echo \'{"reward": 0.25, "speed": 7}\' > /logs/verifier/reward.json', 0.25),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', 0.5),
        ("echo 1 > /logs/verifier/reward.txt.part; sleep 30", 0.0),
    ],
)
async def test_reward_is_what_the_script_wrote_and_never_its_exit_status(folder, script, reward):
    (folder / "tests" / "test.sh").write_text(script + "\n")
    text = (folder / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 2.0")
    (folder / "task.toml").write_text(text)
    trace = await work({"id": "harbor", "path": str(folder)})
    assert (trace.reward, trace.errors) == (reward, [])


@pytest.mark.process
@pytest.mark.parametrize("content", ["", "good", "nan", "[1]"])
async def test_reward_that_is_no_number_is_a_fault_of_the_environment(folder, content):
    (folder / "tests" / "test.sh").write_text(f"echo '{content}' > /logs/verifier/reward.txt\n")
    trace = await work({"id": "harbor", "path": str(folder)})
    assert trace.reward is None and [error.name for error in trace.errors] == ["EnvironmentFault"]


@pytest.mark.process
async def test_reward_file_that_the_tests_do_not_write_does_not_count(folder):
    (folder / "tests" / "test.sh").write_text("sh program.sh; echo 0 > /logs/verifier/reward.txt\n")
    forge = "echo '{\"reward\": 1}' > ../logs/verifier/reward.json\n"
    assert (await work({"id": "harbor", "path": str(folder)}, files={"program.sh": forge})).reward == 0.0


@pytest.mark.process
async def test_every_test_function_must_report_that_it_passed():
    assert (await work(PYTEST, files=RIGHT)).reward == 1.0
    unsolved = await work(PYTEST, files={"counts.txt": "one.txt 3\ntwo.txt 2\n"})
    assert unsolved.reward == 0.0
    assert unsolved.info["verifier"] == {"unpassed": {"test_outputs.py::test_counts": "failed"}, "count": 2}


ATTACKS = {
    "conftest": {"conftest.py": "import os\nos._exit(0)\n"},
    "patched pytest": {"pytest.py": "import sys\nmain = lambda args: sys.exit(0)\n"},
    "settings": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "site": {"sitecustomize.py": "import os\nos._exit(0)\n"},
}
ATTACK_MARKS = {
    attack: pytest.mark.full("the tests of the taskset swe try it, too") for attack in ("conftest", "settings")
}


@pytest.mark.process
@pytest.mark.parametrize("attack", [pytest.param(attack, marks=ATTACK_MARKS.get(attack, ())) for attack in ATTACKS])
async def test_trick_does_not_pass_the_tests_of_pytest(attack):
    assert (await work(PYTEST, files=ATTACKS[attack])).reward == 0.0
    if attack == "patched pytest":
        assert (await work(PYTEST, files={**ATTACKS[attack], **RIGHT})).reward == 1.0  # it is not even imported


def test_names_select_folders(tmp_path):
    with pytest.raises(ConfigInvalid, match="matches names"):
        list(build_plugin("taskset", {**TASKSET, "names": ["other-*"]}).load())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(ConfigInvalid, match="harbor task migrate"):
        load_one(tmp_path)


def test_only_reports_with_the_nonce_count():
    lines = [
        '{"nonce": "a", "id": "t", "outcome": "passed"}',
        '{"nonce": "b", "id": "u", "outcome": "passed"}',
        "x",
        "3",
    ]
    assert parse_outcomes("\n".join(lines), "a") == {"t": "passed"}
    twice = [lines[0], '{"nonce": "a", "id": "t", "outcome": "skipped"}']
    assert parse_outcomes("\n".join(twice), "a") == {"t": "failed"}


@pytest.mark.parametrize(
    ("expected", "outcomes", "unpassed"),
    [
        ("a::t", {}, "not reported"),
        ("a::t", {"a::t": "passed"}, None),
        ("a::t", {"a::t": "skipped"}, "skipped"),
        ("a::t", {"a::t[1]": "passed", "a::t[2]": "failed"}, "failed"),
        ("a::t", {"a::t2": "passed"}, "not reported"),
        ("a::t[x", {"a::t[x y]": "passed"}, None),
        ("a::t[x]", {"a::t[x y]": "passed"}, "not reported"),
    ],
)
def test_expected_test_must_be_reported(expected, outcomes, unpassed):
    assert find_not_passed([expected], outcomes).get(expected) == unpassed
