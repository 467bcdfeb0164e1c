"""Runs of released versions, which later versions must read: `python -m tests.run.released_runs` adds this version's.

A run is two steps of LoRA with `tiny`, so that its checkpoint is small. Logs and status files are left out. A published
version's archive is never written again.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import ramify
from ramify.model.resolve import resolve_model_path

FOLDER = Path(__file__).parent / "released"
KEPT = ("config.toml", "run.sqlite", "run.sqlite.sha256", "traces", "token_stats", "checkpoints", "weights")
MANIFEST, BASE = "weights/0-000002/manifest.json", "BASE_MODEL"  # stands for the directory of `tiny`
CONFIG = """
name = "released"
max_steps = 2
seq_len = 128

[orchestrator]
batch_size = 8
group_size = 4
max_staleness = 0

[trainer]
record_token_stats = true
lora = { rank = 1, target_modules = ["q_proj"] }

[checkpoint]
interval = 1
keep_last = 1

[[train]]
name = "reverse"
taskset = { id = "reverse-text", num_tasks = 8, max_chars = 6 }
sampling = { max_tokens = 16, seed = 0 }

[[eval]]
name = "held-out"
taskset = { id = "reverse-text", split = "eval", num_tasks = 4, max_chars = 6 }
sampling = { max_tokens = 16, seed = 0 }
num_tasks = 4
"""


def write_run(archive: Path) -> None:
    """Make a run with this version, and archive what later versions must read."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rl.toml").write_text(CONFIG)
        subprocess.run([sys.executable, "-m", "ramify", "rl", "@", "rl.toml"], cwd=folder, check=True, timeout=600)
        run = Path(folder) / "outputs" / "released"
        manifest = run / MANIFEST
        manifest.write_text(manifest.read_text().replace(str(resolve_model_path("tiny")), BASE))
        with tarfile.open(archive, "w:xz") as tar:
            for name in KEPT:
                tar.add(run / name, name, filter=_without_owner)


def unpack_run(archive: Path, folder: Path) -> Path:
    """Return the directory `released` in `folder` with an archived run."""
    run = folder / "released"
    with tarfile.open(archive) as tar:
        tar.extractall(run, filter="data")
    manifest = run / MANIFEST
    manifest.write_text(manifest.read_text().replace(BASE, str(resolve_model_path("tiny"))))
    return run


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_run(FOLDER / f"{ramify.__version__}.tar.xz")
