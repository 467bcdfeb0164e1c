"""A model server as a child process: `ramify serve`, for an eval that names a model and no server."""

import os
from pathlib import Path
from typing import IO

from ramify.core.errors import ProviderError
from ramify.infer.config import ServeConfig
from ramify.processes.interpreter import ENGINE_PYTHON_VARIABLE
from ramify.processes.server_process import ServerProcess
from ramify.run.store import storage_call

STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL


class EngineProcess(ServerProcess):
    """One `ramify serve` process. Its output is in `logs/inference.log` of the run directory."""

    title, exit_error = "the model server", ProviderError

    def __init__(self, config: ServeConfig, run_dir: Path, *, start_timeout: float) -> None:
        config_path, log_path = run_dir / "configs" / "serve.toml", run_dir / "logs" / "inference.log"
        super().__init__(
            "serve",
            config,
            config_path,
            log_path,
            start_timeout=start_timeout,
            stop_timeout=STOP_TIMEOUT,
            python=os.environ.get(ENGINE_PYTHON_VARIABLE),
        )

    def open_files(self) -> IO[bytes]:
        """Write the configuration file, and open the log. Raises StorageFull or StorageFailed."""
        with storage_call(self.log.path):
            return super().open_files()
