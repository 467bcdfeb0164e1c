"""A finished SFT run with the weights of two steps, without training."""

from pathlib import Path

from ramify.core.config import write_toml
from ramify.model.resolve import resolve_model_path
from ramify.run.store import Ledger, open_run
from ramify.run.store.run_log import RunLog
from ramify.trace.version import PolicyVersion
from ramify.train.sft.config import SftConfig, SftDataConfig
from tests.support.models import publish_as


def write_trained_run(path: Path) -> Path:
    """Write a run with the weights of steps 2 and 4, of which step 2 has the higher reward, and an eval at step 6."""
    with open_run(path, {}, fresh=False) as store:
        Ledger.open(store)
        for step, value in ((2, 0.75), (4, 0.5), (6, 1.0)):
            RunLog(store).log_metrics(step, {"eval/held-out/avg": value, "train/loss": 1 / step})
    write_toml(SftConfig(data=SftDataConfig(path="/home/me/rows.jsonl")), path / "config.toml")
    for step in (2, 4):
        publish_as(path / "weights" / f"0-{step:06}", resolve_model_path("tiny"), PolicyVersion(path.name, 0, step))
        checkpoint = path / "checkpoints" / f"step_{step:06}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checkpoint.json").touch()
    return path
