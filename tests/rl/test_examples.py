"""Examples that learn: LoRA, a judge, self-play, searches after a warm start; and the harness rlm with its branches."""

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.engine import ScriptedEngine, run_engine
from tests.support.runs import read_values, run_command

pytestmark = [pytest.mark.run, pytest.mark.timeout(1800), pytest.mark.full("minutes of two cores")]

EXAMPLES = Path(__file__).parents[2] / "examples"
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]
NO_BASELINE = """
import ramify as rf


class Reinforce(rf.Algorithm):
    def advantages(self, rewards, traces):
        return rewards
"""


def run_example(home: Path, file: str, *flags: str) -> Path:
    """Run an example to its end, and return the directory of the run."""
    result = run_command("rl", "@", str(EXAMPLES / file), "--name", "run", *flags, cwd=home, timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return home / "outputs" / "run"


def test_adapters_learn_to_reverse_text(tmp_path):
    run = run_example(tmp_path, "reverse_text/rl.toml", *LORA, "--trainer.optim.lr", "3e-3", "--max_steps", "25")
    rewards = read_values(run, "reward/all/mean")
    assert fmean(rewards[-5:]) >= fmean(rewards[:5]) + 0.2
    evals = read_values(run, "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.2


def rank_by_similarity(prompt: str) -> str:
    """Rank replies by their similarity to the reference answer."""
    answer = prompt.partition("# Reference answer\n")[2].partition("\n")[0]
    replies = re.findall(r'<reply-\w+ number="\d+">\n(.*?)\n</reply-', prompt, re.DOTALL)
    scores = [difflib.SequenceMatcher(None, reply, answer).ratio() for reply in replies]
    return json.dumps({"reason": "", "ranks": [1 + sum(other > score for other in scores) for score in scores]})


def test_a_relative_judge_teaches(tmp_path):
    with run_engine(ScriptedEngine(rank_by_similarity, owner=None)) as judge:
        taskset = {"id": str(EXAMPLES / "reverse_text" / "judged.py"), "judge.base_url": f"{judge.url}/v1"}
        flags = [argument for key, value in taskset.items() for argument in (f"--train.0.taskset.{key}", value)]
        run = run_example(tmp_path, "reverse_text/judged.toml", *flags)
        prompts = [request["messages"][0]["content"] for request in judge.requests]
    evals = read_values(run, "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.25
    assert read_values(run, "metric/judged/judge/calls")[0] == 1 / 8  # one call for a group of 8
    assert len(prompts) == len(set(prompts))


def test_rlm_trains_two_steps(tmp_path):
    run = run_example(tmp_path, "wikispeedia/rl_rlm.toml", "--max_steps", "2")
    assert len(read_values(run, "reward/all/mean")) == 2


@pytest.mark.parametrize("agent", ["chat", str(EXAMPLES / "wiki_search" / "agent.py")])
def test_searching_is_learned(tmp_path, agent):
    (tmp_path / "outputs").mkdir()
    writer = [sys.executable, str(EXAMPLES / "wiki_search" / "write_sft_data.py"), "outputs/wiki-search.jsonl"]
    subprocess.run(writer, cwd=tmp_path, check=True, timeout=60)
    result = run_command("sft", "@", str(EXAMPLES / "wiki_search" / "sft.toml"), cwd=tmp_path, timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    flags = ["-m", "outputs/wiki-search-sft/weights/0-000150"]
    flags += ["--train.0.harness.id", agent, "--eval.0.harness.id", agent]
    evals = read_values(run_example(tmp_path, "wiki_search/rl.toml", *flags), "eval/held-out/avg")
    assert evals[-1] >= evals[0] + 0.2


def test_rae_learns_and_no_baseline_is_slower(tmp_path):
    (tmp_path / "reinforce.py").write_text(NO_BASELINE)
    evals = {}
    for id in ("rae", str(tmp_path / "reinforce.py")):
        home = tmp_path / Path(id).stem
        home.mkdir()
        flags = ["--max_steps", "20", "--train.0.taskset.id", str(EXAMPLES / "reverse_text" / "duel.py")]
        run = run_example(home, "reverse_text/duel.toml", *flags, "--train.0.algorithm.id", id)
        evals[home.name] = read_values(run, "eval/held-out/avg")
    assert evals["rae"][-1] >= evals["rae"][0] + 0.3
    assert evals["reinforce"][-1] <= evals["rae"][-1] - 0.03
