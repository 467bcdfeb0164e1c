"""An env server as a child process: `ramify env-server`."""

from pathlib import Path
from typing import IO

from ramify.core.errors import ProcessDied
from ramify.processes.server_process import ServerProcess
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.run.store import storage_call

STOP_MARGIN = 30.0  # seconds to stop the workers, after `shutdown_timeout` seconds for running attempts


class EnvServerProcess(ServerProcess):
    """One `ramify env-server` process; its configuration is written to `config_path`.

    Its output is in `logs/env-server.log` of the run directory; what its workers print is in the log of the source.
    """

    title, exit_error = "the env server", ProcessDied

    def __init__(self, config: EnvServerConfig, config_path: Path, *, start_timeout: float = 180.0) -> None:
        stop_timeout, log_path = config.shutdown_timeout + STOP_MARGIN, config.output / "logs" / "env-server.log"
        super().__init__(
            "env-server", config, config_path, log_path, start_timeout=start_timeout, stop_timeout=stop_timeout
        )

    def open_files(self) -> IO[bytes]:
        """Write the configuration file, and open the log. Raises StorageFull or StorageFailed."""
        with storage_call(self.log.path):
            return super().open_files()
