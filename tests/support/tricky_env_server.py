"""Configs and tasks of env servers with the taskset `Tricky`."""

from pathlib import Path
from typing import Any

from ramify.processes.wire import WireSettings
from ramify.rollout.envserver import EnvServerConfig
from tests.support import tricky_taskset

TASKSETS_FILE = tricky_taskset.__file__
QUICK = WireSettings(heartbeat_interval=0.2, server_timeout=3.0)
STATIC = {"type": "static", "workers": 2}


def make_config(url: str, tmp_path: Path, *, cls: str = "Tricky", **options: Any) -> EnvServerConfig:
    source_keys = ("taskset", "pool", "max_tries", "name", "address", "kind", "runtime", "harness")
    source_options = {key: options.pop(key) for key in source_keys if key in options}
    source = {
        "name": source_options.get("name", "tricky"),
        "taskset": {"id": f"{TASKSETS_FILE}:{cls}", **source_options.get("taskset", {})},
        "pool": source_options.get("pool", STATIC),
        "max_tries": source_options.get("max_tries", 1),
        "address": source_options.get("address"),
        "runtime": source_options.get("runtime", {"id": "local"}),
        "harness": source_options.get("harness", {"id": "chat"}),
    }
    return EnvServerConfig.model_validate(
        {
            source_options.get("kind", "train"): [source],
            "inference": {"engine": "external", "base_url": [url]},
            "output": tmp_path,
            "heartbeat_interval": 0.2,
            "shutdown_timeout": 0.5,
            "client_timeout": 2.0,
            **options,
        }
    )


def task(number: int, **options: Any) -> dict[str, Any]:
    return {"prompt": f"say {number}", "key": f"task-{number}", "number": number, **options}
