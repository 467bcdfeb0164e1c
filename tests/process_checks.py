"""Looking at processes that may end meanwhile."""

import psutil


def runs(pid: int) -> bool:
    """Whether it is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
