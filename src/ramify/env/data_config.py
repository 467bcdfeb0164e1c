"""The keys that name rows: of the tasksets `dataset` and `swe`, and of `[data]` and `[validation]` of `ramify sft`."""

from ramify.core.config import Config


class DataFilesConfig(Config):
    """Which files hold the rows of a dataset.

    - `path`, `revision`: files here, or a dataset of the Hugging Face hub.
    - `subset`, `part`: what is read of it.
    """

    path: str
    """A jsonl, parquet, arrow, csv or json file, a directory of them, or the id ORG/NAME of a Hugging Face dataset."""
    revision: str | None = None
    """Branch, tag or commit of the dataset on the hub. Default: the commit that the run has read so far, or `main`."""
    subset: str | None = None
    """The subset of a dataset that has several, which Hugging Face also calls configuration."""
    part: str | None = None
    """The part of a dataset or directory to read, such as `train` or `test`. Default: all of it."""


class DataColumnsConfig(DataFilesConfig):
    """Which files hold the rows of a dataset, and the columns that tasks and conversations are both made of.

    - `prompt_column`, `system_column`, `images_column`: the names of the columns.
    """

    prompt_column: str = "prompt"
    """The column of the prompt: text, or a list of messages."""
    system_column: str | None = None
    """The column of the system prompt, if there is one."""
    images_column: str = "images"
    """The column of the images that messages refer to by `{"type": "image"}`, in order; optional."""
