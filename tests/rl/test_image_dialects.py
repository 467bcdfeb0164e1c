"""`ramify rl` trains on rollouts of agents that send images with real SDKs, in each dialect."""

import os
from pathlib import Path

import pytest

from ramify.store import RunStore
from ramify.store.ledger import Ledger
from tests.rl.run_helpers import metrics, run_command

DIALECTS = ("chat", "responses", "messages")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("RAMIFY_FULL"), reason="a minute of two cores; tests/gateway has the parts"),
]

CONFIG = """
name = "run"
max_steps = 2
seq_len = 640

[model]
name = "tiny-vision"

[orchestrator]
batch_size = 12                  # one group of each dialect
group_size = 4
max_staleness = 0
"""
SOURCE = """
[[train]]
name = "DIALECT"
taskset = { id = "tests.rl.image_agents:SdkSquares", dialect = "DIALECT" }
sampling = { temperature = 1.0, max_tokens = 12 }
"""


def test_images_of_every_sdk_are_trained(tmp_path):
    (tmp_path / "rl.toml").write_text(CONFIG + "".join(SOURCE.replace("DIALECT", name) for name in DIALECTS))
    result = run_command("rl", "@", str(tmp_path / "rl.toml"), "-o", str(tmp_path / "outputs"), cwd=Path.cwd())
    assert result.returncode == 0, result.stdout + result.stderr
    with RunStore.open(tmp_path / "outputs/run", write=False) as store:
        ledger = Ledger.open_readonly(store)
        trained = {group.number: group.source for group in ledger.groups() if group.step is not None}
        assert set(trained.values()) == set(DIALECTS)
        for attempt in ledger.attempts():
            if attempt.group_number in trained and attempt.rollout_id is not None:
                (trace,) = store.read_traces(attempt.rollout_id)
                (leaf,) = trace.leaves  # no turn broke the history
                assert len(trace.graph.path_media(leaf)) == 6 and len(trace.sampled_nodes) == 3
                assert all(node.is_trainable for node in trace.nodes)
    assert all(count > 0 for count in metrics(tmp_path, "forest/images"))
    assert all(value < 1e-6 for value in metrics(tmp_path, "mismatch_kl"))
    assert set(metrics(tmp_path, "render/breaks")) == {0.0}
