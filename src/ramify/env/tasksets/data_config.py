"""The keys that name rows: of the tasksets `dataset` and `swe`, and of `[data]` and `[validation]` of `ramify sft`."""

from pathlib import Path
from typing import Any

from ramify.core.config import Config
from ramify.core.hub import HubRepo, looks_like_id

DATA_SUFFIXES = (".jsonl", ".parquet", ".arrow", ".csv", ".json")


class DataFilesConfig(Config):
    """Which files hold the rows."""

    path: str
    """A jsonl, parquet, arrow, csv or json file, a directory of them, or the id ORG/NAME of a Hugging Face dataset."""
    revision: str | None = None
    """Branch, tag or commit of the dataset on the hub. Default: the commit that the run has read so far, or `main`."""
    subset: str | None = None
    """The subset of a dataset that has several, which Hugging Face also calls configuration."""
    part: str | None = None
    """The part of a dataset or directory to read, such as `train` or `test`. Default: all of it."""

    @property
    def repo(self) -> HubRepo | None:
        """The dataset on the hub; None if `path` is, or can only be, a path here."""
        is_path = Path(self.path).suffix in DATA_SUFFIXES or Path(self.path).expanduser().exists()
        return None if is_path or not looks_like_id(self.path) else HubRepo("dataset", self.path)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "DataFilesConfig":
        """Return the keys that name the rows, out of a table with more keys. Raises ValueError if one is invalid."""
        return DataFilesConfig(**{key: table[key] for key in DataFilesConfig.model_fields if key in table})


class DataColumnsConfig(DataFilesConfig):
    """Which files hold the rows, and the columns that tasks and conversations are both made of."""

    prompt_column: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    system_column: str | None = None
    """The column of the system prompt, if there is one."""
    images_column: str = "images"
    """The column of the images that messages refer to by `{"type": "image"}`, in order; optional."""
