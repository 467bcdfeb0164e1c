"""`ramify rl --dry-run` refuses what the processes of the run would refuse at start."""

import fcntl
import re
import shutil
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.launch.ray_launcher import RayLauncher
from ramify.model.resolve import read_max_positions, resolve_model_path
from ramify.run.store import open_run

pytestmark = pytest.mark.process

TASKSETS = """
import ramify as rf


class Sound(rf.Taskset):
    def load(self):
        yield rf.Task(prompt="one?", answer="1")

    @rf.reward
    def right(self, task, trace):
        return float(trace.last_reply == task.answer)


class Raising(Sound):
    def load(self):
        raise RuntimeError("the corpus is not there")


class Empty(Sound):
    def load(self):
        return []


class Promptless(Sound):
    def load(self):
        yield rf.Task(answer="1")


class Linked(Sound):
    def load(self):
        image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
        yield rf.Task(prompt=[{"role": "user", "content": [image]}], answer="1")
"""
ADDRESS = "orchestrator.address: tcp://0.0.0.0:5555 can be reached from other machines"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAMIFY_SECRET", raising=False)
    Path("envs.py").write_text(TASKSETS)


def test_unloadable_tasks_and_losses_are_reported_together(capsys):
    names = ("Sound", "Raising", "Empty", "Promptless")
    sources = "".join(f'[[train]]\nname = "{name}"\ntaskset = {{ id = "envs.py:{name}" }}\n' for name in names)
    Path("run.toml").write_text(f'{sources}[trainer.loss]\nid = "nowhere.loss"\n')
    assert main(["rl", "@", "run.toml", "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "train.1.taskset: load raised RuntimeError: the corpus is not there" in message
    assert "train.2.taskset: has no tasks" in message
    assert "train.3.taskset: task " in message and "has no prompt" in message
    assert "trainer.loss: loss 'nowhere.loss' cannot be imported" in message
    assert "train.0" not in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "tinny"], "did you mean 'tiny'?"),
        (["-m", "./nowhere"], "model.name: model './nowhere' was not found"),
        (["-m", "./weightless"], "/weightless has no weights"),
        (["-m", "/etc"], "model.name: model '/etc' was not found (/etc: has no config.json)"),
        (["--orchestrator.address", "tcp://0.0.0.0:5555"], ADDRESS),
        (["--renderer.type", "family", "--renderer.name", "nonsense"], "renderer: "),
    ],
)
@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_refuses_what_a_process_would_refuse(args, message, capsys):
    shutil.copytree(resolve_model_path("tiny"), "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["rl", "envs.py:Sound", *args, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_ranks_address_and_plugin_tables_are_reported_together(capsys):
    args = ["--orchestrator.address", "tcp://0.0.0.0:5555", "--train.0.harness.max_turn", "3", "--dry-run"]
    assert main(["rl", "envs.py:Sound", "-m", "tiny-vision", "--launch.trainer_gpus", "2", *args]) == 2
    message = capsys.readouterr().err
    assert "launch.trainer_gpus: tiny-vision is a vision-language model" in message
    assert ADDRESS in message and "train.0.harness.max_turn: unknown" in message


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.usefixtures("check_plugins_in_process")
def test_models_and_plugin_tables_are_checked_before_the_nodes_of_a_cluster(flags, capsys, monkeypatch):
    monkeypatch.setattr(RayLauncher, "connect", lambda address: pytest.fail("connected"))
    rl = ["rl", "envs.py:Sound", "--cluster", "ray", *flags]
    assert main([*rl, "-m", "tinny"]) == 2
    assert "did you mean 'tiny'?" in capsys.readouterr().err
    assert main([*rl, "--train.0.harness.max_turn", "3"]) == 2
    assert "train.0.harness.max_turn: unknown" in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_compaction_that_is_never_reached_is_refused_before_anything_starts(capsys):
    args = ["--train.0.harness.compact_at", "512", "--seq_len", "512", "--dry-run"]
    assert main(["rl", "envs.py:Sound", *args]) == 2
    assert "train.0: harness.compact_at: 512 tokens are never reached" in capsys.readouterr().err
    assert main(["eval", "envs.py:Sound", "-m", "tiny", "--harness.compact_at", "1000000", "--dry-run"]) == 2
    assert "harness.compact_at: 1000000 tokens are never reached" in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_dry_run_refuses_missing_directories_of_models_and_names_those_that_may_come(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(Path("hub").absolute()))
    Path("outputs/run/weights/2-000040").mkdir(parents=True)
    Path("outputs/run/weights/2-000040/config.json").write_text("{}")
    names = {"teacher": "outputs/run/weights/0-000040", "short": "outputs/typo", "hub": "org/model", "started": "tiny"}
    models = [word for key, name in names.items() for word in (f"--models.{key}.name", name)]
    rl = ["rl", "envs.py:Sound", "--name", "other", *models, "--dry-run"]
    assert main(rl) == 0
    lines = capsys.readouterr().out.splitlines()
    download = "the run downloads org/model when it starts; to do it now: 'ramify model fetch org/model'"
    assert f"note: models.hub.name: {download}" in lines
    notes, teacher = [line for line in lines if "not checked" in line], names["teacher"]
    assert notes == [
        f"note: models.teacher.name: not checked: model {teacher!r} was not found ({teacher}: does not exist): "
        "outputs/run/weights holds 2-000040",
        "note: models.short.name: not checked: model 'outputs/typo' was not found (outputs/typo: does not exist; "
        f"{Path('hub/models--outputs--typo/snapshots').absolute()}: does not exist): "
        "'ramify model fetch outputs/typo' downloads it",
    ]
    assert main([*rl, "--models.judge.name", "./judge", "--models.typo.name", "tinny"]) == 2
    problems = capsys.readouterr().err
    assert "models.judge.name: model './judge' was not found (judge: does not exist)" in problems
    assert "models.typo.name: model 'tinny' was not found" in problems and "did you mean 'tiny'?" in problems


@pytest.mark.usefixtures("check_plugins_in_process")
def test_a_plan_that_does_not_fit_is_refused_with_plans_that_do(capsys):
    rl = ["rl", "envs.py:Sound", "-m", "Qwen/Qwen3-4B", "--dry-run"]
    assert main([*rl, "--assume-gpus", "1x40"]) == 2
    problem = capsys.readouterr().err
    assert "not enough memory: GPU 0 has 40.0 GiB, the run needs about " in problem
    options = re.findall(
        r"with (these settings |(?:--[\w.]+ [\w.]+ ?)+)(?:on \d GPUs \((--assume-gpus \w+)\))?", problem
    )
    assert any("--trainer.lora.enabled true" in flags for flags, _ in options)
    assert any("--assume-gpus" in gpus for _, gpus in options)
    for flags, gpus in options:
        assert main([*rl, *flags.replace("these settings", "").split(), *(gpus or "--assume-gpus 1x40").split()]) == 0
    assert main([*rl, "--assume-gpus", "1x80"]) == 0
    capsys.readouterr()
    assert main(["rl", "envs.py:Sound", "-m", "org/Model-700B", "--assume-gpus", "8x80", "--dry-run"]) == 2
    assert "it would fit with a smaller model" in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_lengths_beyond_the_sequence_or_the_model_are_noted(capsys):
    flags = ["--seq_len", "3000", "--train.0.sampling.max_tokens", "4000", "--eval.0.sampling.max_tokens", "99"]
    assert main(["rl", "envs.py:Sound", "-m", "tiny", *flags, "--eval.0.seq_len", "64", "--dry-run"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    length = read_max_positions(resolve_model_path("tiny"))
    assert notes == [
        f"note: seq_len: 3000 is longer than the model allows, {length} tokens",
        f"note: train.0.sampling.max_tokens: 4000 is more than the model allows, {length}: "
        f"prompt and reply together end at {length} tokens",
        "note: eval.0.sampling.max_tokens: 99 is more than seq_len, 64: prompt and reply together end at 64 tokens",
    ]


@pytest.mark.usefixtures("check_plugins_in_process")
def test_directory_of_another_run_is_refused_without_fresh(capsys):
    path = Path("outputs/run")
    open_run(path, {"model": "another"}).close()
    before = sorted(file.name for file in path.iterdir())
    assert main(["rl", "envs.py:Sound", "--name", "run", "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert (
        "outputs/run holds a run with another identity; differences:" in message and "model: was 'another'" in message
    )
    assert main(["rl", "envs.py:Sound", "--name", "run", "--fresh", "--dry-run"]) == 0
    assert sorted(file.name for file in path.iterdir()) == before


@pytest.mark.usefixtures("check_plugins_in_process")
def test_busy_run_is_refused(capsys):
    Path("outputs").mkdir()
    with Path("outputs/.run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["rl", "envs.py:Sound", "--name", "run", "--dry-run"]) == 1
    assert "RunBusy: outputs/run is in use by another `ramify rl`" in capsys.readouterr().err


@pytest.mark.usefixtures("check_plugins_in_process")
def test_problems_of_plugin_tables_name_the_file_or_flag(capsys):
    Path("run.toml").write_text('[[train]]\ntaskset = { id = "envs.py:Sound", size = 3 }\nharness = { id = "chatt" }\n')
    flags = ["--train.0.runtime.wrkdir_root", "/", "--train.0.algorithm.id=grop"]
    for command in (["rl"], ["orchestrator", "-b", "http://127.0.0.1:9"]):
        assert main([*command, "@", "run.toml", *flags]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "4 problems in the configuration:"
        origins = {line.split(":")[0].strip(): line.rpartition(" ")[2] for line in lines[1:]}
        assert origins == {
            "train.0.taskset.size": "(run.toml)",
            "train.0.harness.id": "(run.toml)",
            "train.0.runtime.wrkdir_root": "(--train.0.runtime.wrkdir_root)",
            "train.0.algorithm.id": "(--train.0.algorithm.id)",
        }


@pytest.mark.usefixtures("check_plugins_in_process")
def test_flags_that_a_command_adds_itself_are_not_named(capsys):
    for command, flag in {"eval": "--runtime.bad", "validate": "--runtime.bad", "rl": "--train.0.runtime.bad"}.items():
        assert main([command, "envs.py:Sond", flag, "1"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert any(line.endswith("taskset.id: envs.py has no Sond; did you mean Sound?") for line in lines)
        assert any(line.endswith(f"({flag})") for line in lines)


@pytest.mark.parametrize("command", [["rl", "--dry-run"], ["eval", "--dry-run"], ["eval"]])
@pytest.mark.usefixtures("check_plugins_in_process")
def test_first_task_with_an_unusable_image_is_refused(command, capsys):
    name, *flags = command
    assert main([name, "envs.py:Linked", "-m", "tiny-vision", *flags]) == 2
    message = capsys.readouterr().err
    assert "task.prompt" in message and "https://example.com/cat.png" in message
    assert not Path("outputs").exists()


def test_eval_refuses_images_for_a_text_model(capsys):
    refusal = "color-codeword needs a model that takes images; tiny is a text model: set model.name to another one"
    for flags in (["--dry-run"], []):
        assert main(["eval", "color-codeword", "-m", "tiny", *flags]) == 2
        assert refusal in capsys.readouterr().err
    vllm = ["--inference.engine", "vllm", "--dry-run"]
    assert main(["eval", "color-codeword", "-m", "tiny-vision", *vllm]) == 2
    assert "images are not sent to vLLM: set inference.engine to 'native'" in capsys.readouterr().err
    assert main(["eval", "color-codeword", "-m", "tiny-vision", "--dry-run"]) == 0
