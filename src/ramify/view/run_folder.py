"""The runs in a folder of outputs, by name."""

from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest
from ramify.run.store.index import DATABASE_NAME, TRACES_DIR

CONFIG_FILE = "config.toml"
RUN_CONTENTS = (DATABASE_NAME, CONFIG_FILE, TRACES_DIR)  # a directory with one of these is a run, perhaps a damaged one


class RunFolder:
    """A folder of runs, or the directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list_runs(self) -> dict[str, Path]:
        """Return the directories of the runs by name; none if the folder does not exist."""
        if is_run(self.path):
            return {_get_name(self.path.resolve()): self.path}
        try:
            return {_get_name(path): path for path in sorted(self.path.iterdir()) if is_run(path)}
        except OSError:
            return {}

    def find_run(self, name: str) -> Path:
        """Return the directory of a run. Raises ConfigInvalid if the folder has no run of this name."""
        runs = self.list_runs()
        if name not in runs:
            hint = suggest(name, runs, "open the list of runs to see all of them")
            raise ConfigInvalid(f"{self.path} has no run {name!r}; {hint}")
        return runs[name]


def _get_name(path: Path) -> str:
    """Return the name of a directory; bytes that are not UTF-8, which JSON cannot represent, are written as escapes."""
    return path.name.encode("utf-8", "backslashreplace").decode()


def is_run(path: Path) -> bool:
    """Return whether a directory looks like a run."""
    return path.is_dir() and any((path / name).exists() for name in RUN_CONTENTS)
