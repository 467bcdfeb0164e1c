"""`ramify rl`: invalid configurations, the plan, and how a run ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.cli.arguments import expand_arguments
from ramify.core.config import parse
from ramify.core.errors import DeadlineExceeded
from ramify.infer.config import ExternalServersConfig
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.interpreter import VENVS_VARIABLE
from tests.support.plans import plan_here
from tests.support.processes import RUNS_FOREVER, fails_with, list_running, read_pids, wait_until

pytestmark = pytest.mark.process

FULL = bool(os.environ.get("RAMIFY_FULL"))
ROOT = Path(__file__).parent.parent.parent
OTHER_FILES = {"lora.toml", "sft.toml", "slurm.toml", "adapter.toml"}  # incomplete alone, or with a Python of their own
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*/*.toml")) if path.name not in OTHER_FILES]
NAMES = ("reverse_text", "alphabet_sort", "wikispeedia", "wordle", "general_agent", "dataset", "multi_env")
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm", "aiohttp"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def blocked(tmp_path):
    """Environment variables under which a process and its children cannot import heavy libraries, and find no venv."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, VENVS_VARIABLE: str(tmp_path / "venvs")}


# -- the plan --------------------------------------------------------------------------------------------------------


def test_every_example_has_its_files_and_readme():
    for name in NAMES:
        files = {path.name for path in (ROOT / "examples" / name).iterdir()}
        assert {"README.md", "rl.toml", "rl_gpu.toml", "rl_gpu_shared.toml"} <= files


@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_prints_the_plan(tmp_path, capsys):
    assert main(["rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), "-o", str(tmp_path), "--dry-run"]) == 0
    output = capsys.readouterr()
    for shown in (
        "inference/0: 1 core",
        "env/train/reverse/0",
        "orchestrator",
        "trainer",
        "memory, roughly",
        "dry run",
    ):
        assert shown in output.out
    assert output.err == ""
    files = {path.name for path in (tmp_path / "reverse-text").rglob("*") if path.is_file()}
    assert files == {"config.toml", "plan.txt"}
    assert output.out.endswith(f"configuration is in {tmp_path}/reverse-text/config.toml, the plan in plan.txt\n")


@pytest.mark.usefixtures("check_plugins_in_process")
def test_assumed_gpus_are_planned_but_not_run_on(tmp_path, capsys):
    args = ["rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), "-o", str(tmp_path), "--assume-gpus"]
    assert main([*args, "8x80", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "planned for an assumed machine, 8x80 GiB of GPUs" in out and "  inference/6: GPU 7, " in out
    for words, problem in (
        (["8x80"], "--assume-gpus: only with --dry-run"),
        (["eight", "--dry-run"], "--assume-gpus: expected COUNTxGIB, such as 8x80, got 'eight'"),
        (["1x0", "--dry-run"], "--assume-gpus: expected COUNTxGIB, such as 8x80, got '1x0'"),
        (["0x80", "--dry-run"], "--assume-gpus: expected COUNTxGIB, such as 8x80, got '0x80'"),
        (["1x80", "--dry-run", "--assume-gpus", "2x80"], "--assume-gpus is allowed once"),
        (["8x80", "--dry-run", "--cluster", "ray"], "--assume-gpus: not allowed with --cluster"),
    ):
        assert main([*args, *words]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_does_not_change_the_files_of_a_run(tmp_path, capsys):
    args = ["rl", "@", str(ROOT / "examples/reverse_text/rl.toml"), "-o", str(tmp_path), "--dry-run"]
    assert main(args) == 0
    (tmp_path / "reverse-text" / "supervisor.json").touch()  # exists in a run that was started
    files = list((tmp_path / "reverse-text").rglob("*.toml"))
    before = {path: path.read_bytes() for path in files}
    assert main([*args, "--trainer.optim.lr", "0.5"]) == 0
    assert {path: path.read_bytes() for path in files} == before
    assert "holds a run and is unchanged" in capsys.readouterr().out


EVERY = """
import json, sys
from ramify.core.config import parse
from ramify.launch import plugin_check
from ramify.infer.config import ExternalServersConfig
from ramify.launch.machine import assume_machine
from ramify.launch.plan import format_plan, plan_run
from ramify.orchestrate.run_config import RunConfig

problems, planned = [], json.loads(sys.argv[2])
for file in sys.argv[3:]:
    config = parse(RunConfig, [word for name in file.split("+") for word in ("@", name)] + ["--output", sys.argv[1]])
    if file in planned:
        assert format_plan(*plan_run(config, [assume_machine("4x80")]))
    result = plugin_check.check_request(plugin_check._build_request(config))
    problems += [f"{file}: {problem}" for problem in result["problems"]]
print(json.dumps(problems))
"""


def test_every_example_is_checked_without_heavy_libraries(blocked, tmp_path):
    files = [str(path.relative_to(ROOT)) for path in EXAMPLES]
    files.append("examples/reverse_text/rl.toml+examples/reverse_text/lora.toml")
    # The full tests plan the others too.
    planned = [file for file in files if FULL or "/multi_env/" in file or "reverse_text" in file]
    command = [sys.executable, "-c", EVERY, str(tmp_path), json.dumps(planned), *files]
    result = subprocess.run(command, capture_output=True, text=True, env=blocked, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    problems = json.loads(result.stdout.splitlines()[-1])
    missing = ("does not work on this machine", "/opt/agents does not exist")  # programs to install
    assert [problem for problem in problems if not any(text in problem for text in missing)] == []


@pytest.mark.skipif(not FULL, reason="a process for every file; the test above is the short form")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_example_passes_its_dry_run(blocked, tmp_path, file):
    args = ["rl", "@", str(file), "-o", str(tmp_path), "--dry-run"]
    result = subprocess.run(
        [sys.executable, "-m", "ramify", *args], capture_output=True, text=True, env=blocked, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_examples_for_gpus_leave_sizes_to_the_plan():
    sizes = {"pack_tokens", "recompute_layers", "kv_memory_fraction", "max_running_requests", "max_num_batched_tokens"}
    examples = [tomllib.loads(file.read_text()) for file in EXAMPLES if "_gpu" in file.name]
    assert len(examples) > 8
    for example in examples:
        assert not sizes & (example["trainer"].keys() | example["inference"].keys()), example["name"]
        assert "weights" not in example


def test_flag_value_may_be_negative():
    config = parse(RunConfig, expand_arguments("rl", ["reverse-text", "--taskset.seed", "-1"]))
    assert config.train[0].taskset["seed"] == config.eval[0].taskset["seed"] == -1


def test_taskset_and_model_are_sufficient(tmp_path):
    short = [
        "reverse-text",
        "-m",
        "tiny",
        "--taskset.max_chars",
        "6",
        "-b",
        "http://127.0.0.1:9/v1",
        "-o",
        str(tmp_path),
    ]
    config = parse(RunConfig, expand_arguments("rl", [*short, "--train.0.sampling.temperature", "0.7"]))
    assert config.train[0].taskset == {"id": "reverse-text", "max_chars": 6}
    assert config.eval[0].taskset == {"id": "reverse-text", "split": "eval", "max_chars": 6}
    assert config.train[0].sampling.temperature == 0.7
    assert isinstance(config.inference, ExternalServersConfig) and config.inference.base_url == ["http://127.0.0.1:9"]
    assert [entry.name for entry in plan_here(config).process_specs][:2] == ["orchestrator", "trainer"]


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--inference.vllm.python", "python3"], "inference.vllm: unknown flag --inference.vllm.python"),
        (
            ["--inference.enforce_eager", "true"],
            "inference.enforce_eager: unknown key; it needs inference.engine = 'vllm'",
        ),
        (["--train.0.pool.type", "static", "--train.0.pool.multiplex", "4"], "train.0.pool.multiplex: unknown key"),
        (["--max_step", "7"], "max_step: unknown flag --max_step; did you mean --max_steps?"),
        (["--train.0.sampling.temperature", "0"], "sampling.temperature: 0 cannot be trained on, expected above 0"),
        (["-m", "nowhere/model"], "model.name: model 'nowhere/model' is not in the local cache"),
    ],
)
@pytest.mark.usefixtures("check_plugins_in_process")
def test_invalid_configurations_are_exit_2(capsys, tmp_path, args, message):
    file = str(ROOT / "examples" / "reverse_text" / "rl.toml")
    assert main(["rl", "@", file, "-o", str(tmp_path), *args]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "reverse-text").exists()


# -- how it ends -----------------------------------------------------------------------------------------------------


STUBBED_RL = """
import dataclasses, sys
from pathlib import Path
from ramify.cli.app import main
from ramify.launch import python_api
from ramify.launch.launcher import ProcessRole
from tests.support.processes import RUNS_FOREVER, build_spec

folder, code, *args = sys.argv[1:]
specs = (
    build_spec(Path(folder), "trainer", RUNS_FOREVER, ProcessRole.FOLLOWER),
    build_spec(Path(folder), "orchestrator", code, ProcessRole.LEADER),
)
build_plan = python_api.build_plan
python_api.build_plan = lambda *args, **more: dataclasses.replace(build_plan(*args, **more), process_specs=specs)
python_api.check_plugin_tables = lambda config: {}
sys.exit(main(["rl", *args]))
"""


def start_stubbed(folder: Path, code: str) -> subprocess.Popen[str]:
    """Start `ramify rl` with small scripts instead of its processes."""
    shutil.copy(ROOT / "examples" / "reverse_text" / "rl.toml", folder)
    args = ["@", str(folder / "rl.toml"), "-o", str(folder), "--max_steps", "5"]
    command = [sys.executable, "-c", STUBBED_RL, str(folder), code, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_interrupt_leaves_no_process_and_prints_the_resume_command(tmp_path):
    process = start_stubbed(tmp_path, RUNS_FOREVER)
    wait_until(lambda: read_pids(tmp_path, "orchestrator") and read_pids(tmp_path, "trainer"), timeout=60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert list_running(tmp_path) == []
    resume_command = f"ramify rl @ {tmp_path}/rl.toml -o {tmp_path} --max_steps 5"
    assert err == f"interrupted; nothing is finished yet; rerun: {resume_command}\n"


def test_failure_prints_its_name_and_the_resume_command(tmp_path):
    ending = fails_with(DeadlineExceeded("batch 3 waited for inference"))
    out, err = start_stubbed(tmp_path, ending).communicate()
    assert err.splitlines()[-1] == "DeadlineExceeded: batch 3 waited for inference"
    assert "nothing is finished yet; rerun: ramify rl @" in err
    assert "Traceback" not in out + err
