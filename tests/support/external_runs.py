"""Two training steps of `ramify rl` with a running server: the start of the run's file, and its metrics."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_START = """
name = "{name}"
output = "{folder}/outputs"
max_steps = 2
seq_len = {seq_len}

[model]
name = "{model}"

[inference]
engine = "external"
base_url = ["{url}"]

[trainer]
pack_tokens = {pack_tokens}
optim = {{ lr = 1e-5 }}

[orchestrator]
batch_size = 4
group_size = 4
max_staleness = 1
"""


def read_metric(run: Path, name: str) -> list[float]:
    """Return the values of a metric of a run."""
    command = [sys.executable, "-m", "ramify", "metrics", str(run), "--name", name, "--json"]
    output = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    values = [point["value"] for point in json.loads(output)]
    assert values, name
    return values


def format_table(table: dict[str, Any]) -> str:
    """Return a table in TOML, which writes texts, numbers and lists as JSON does."""
    parts = [
        f"{key} = {format_table(value) if isinstance(value, dict) else json.dumps(value)}"
        for key, value in table.items()
    ]
    return "{ " + ", ".join(parts) + " }"
