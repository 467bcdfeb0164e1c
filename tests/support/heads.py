"""The head of a run, with its history in a shared directory."""

from pathlib import Path

from ramify.launch.head import prepare_head
from ramify.orchestrate.run_config import RunConfig
from ramify.run.fencing.head_log import DirectoryStore
from ramify.run.store import open_run
from ramify.run.store.head_replication import HeadReplicator
from ramify.run.store.ledger import Ledger
from tests.support.ledgers import run_all

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


def make_config(folder: Path, head: str, **more) -> RunConfig:
    cluster = {"shared_directory": folder / "shared"}
    return RunConfig(**{"name": "run", "output": folder / head, "train": [TRAIN], "cluster": cluster, **more})


def start(config: RunConfig, **options) -> Ledger:
    """Do what the start of a run does with its directory, and return its ledger, which the caller must close."""
    lines = []
    prepare_head(config, print_line=lines.append, **options)
    store = open_run(config.path, config.identity)
    ledger = Ledger.open(store)
    ledger.replicate = HeadReplicator(store, DirectoryStore(config.shared_path)).replicate
    run_all(ledger.replicate())
    ledger.lines = lines
    return ledger
