"""Words of other trainers and tools are answered with what to write instead."""

from pathlib import Path

import pytest

from ramify.cli import main
from ramify.core.config.layers import find_key_hint, load_hints
from ramify.orchestrate.run_config import RunConfig
from ramify.train.sft.config import SftConfig

RUN = 'name = "x"\n[[train]]\ntaskset = { id = "reverse-text" }\n'


@pytest.mark.parametrize("name", load_hints("keys"))
def test_every_hint_names_a_key(name):
    assert find_key_hint(RunConfig, name) or find_key_hint(SftConfig, name)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["train"], "'ramify rl' trains with reinforcement learning, 'ramify sft' on conversations"),
        (["rl", "x.toml"], "'x.toml' is not a taskset: a configuration file is '@ x.toml'"),
        (["eval", "x.toml", "-m", "tiny"], "'x.toml' is not a taskset: a configuration file is '@ x.toml'"),
        (["rl", "x.csv"], "'dataset --taskset.path x.csv' for `ramify rl`"),
        (["sft", "x.csv"], "unexpected argument 'x.csv': data is '-d x.csv' for `ramify sft`"),
        (["sft", "x.toml"], "unexpected argument 'x.toml': a configuration file is '@ x.toml'"),
        (["rl", "--config", "x.toml"], "unknown flag --config; a file is given as '@ x.toml'"),
        (["rl", "@", "run.toml", "--learning_rate", "1e-4"], "did you mean --trainer.optim.lr?"),
        (["rl", "@", "run.toml", "--trainer.lr", "1e-4"], "did you mean --trainer.optim.lr?"),
        (["rl", "@", "run.toml", "--num_generations", "8"], "did you mean --orchestrator.group_size?"),
        (["sft", "-d", "x.csv", "--per_device_train_batch_size", "8"], "did you mean --batch_size?"),
        (["rl", "@", "run.toml", "--trainer.loss.id", "grpo"], "'grpo'; it is an algorithm"),
        (["rl", "@", "train.toml"], "train: expected a list of tables, each written as [[train]], got one table"),
        (
            ["rl", "@", "run.toml", "@", "wandb.toml"],
            'wandb: unknown key; did you mean monitor.sinks = [{ type = "wandb"',
        ),
        (["rl", "@", "run.toml", "@", "lr.toml"], "trainer.learning_rate: unknown key; did you mean trainer.optim.lr?"),
    ],
)
def test_words_of_other_tools_are_answered(args, hint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    Path("train.toml").write_text(RUN.replace("[[train]]", "[train]"))
    Path("wandb.toml").write_text('[wandb]\nproject = "p"\n')
    Path("lr.toml").write_text("[trainer]\nlearning_rate = 1e-5\n")
    assert main(args) == 2
    assert hint in capsys.readouterr().err
