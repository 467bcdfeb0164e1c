"""Names that tell which process made a thing, so that what a killed process left can be told from what is in use."""

import contextlib

import psutil

START_TIME_TOLERANCE = 200  # hundredths of a second: the clock that start times refer to may be adjusted


def make_owner_name(number: int | str) -> str:
    """Return a name that holds the id and the start time of this process, and a number."""
    process = psutil.Process()
    return f"{process.pid}-{int(process.create_time() * 100)}-{number}"


def is_owner_alive(name: str) -> bool:
    """Return whether the process that made a name still runs. A name of another form counts as in use."""
    fields = name.split("-")
    if len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()):
        return True
    with contextlib.suppress(psutil.NoSuchProcess):
        start_time = psutil.Process(int(fields[0])).create_time() * 100
        return abs(start_time - int(fields[1])) <= START_TIME_TOLERANCE
    return False
