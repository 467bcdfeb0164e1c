"""What the trackio sink uses of trackio; it shares a file with the other one."""

import os

from wandb import Run, Table  # noqa: F401 - the two libraries look alike from here


def init(*, project, name, resume, config):
    folder = os.environ["TRACKIO_FOLDER"]
    return Run({"project": project, "entity": None, "name": name, "id": name, "resume": resume, "dir": folder})
