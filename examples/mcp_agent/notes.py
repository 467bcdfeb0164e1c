"""A trail of notes. Only the tool `read_note` knows which note comes next, so nobody can follow it without the tool."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import ramify as rf

NUM_NOTES = 3


class Notes(rf.Taskset):
    """Follow a trail of three notes, each of which names the next one."""

    def load(self) -> Iterator[rf.Task]:
        """Yield tasks without end. A prompt has the name of the first note."""
        rng = random.Random(0)
        while True:
            names = [f"{rng.choice('ABCDRX')}{rng.randint(1, 99)}" for _ in range(NUM_NOTES)]
            yield rf.Task(prompt=f"Please read the note with name {names[0]}.", names=names)

    def setup(self, state: SimpleNamespace) -> None:
        """No note has been read."""
        state.num_read = 0

    @rf.tool
    def read_note(self, name: str, task: rf.Task, state: SimpleNamespace) -> str:
        """Read the note."""
        if state.num_read == NUM_NOTES or name != task.names[state.num_read]:
            return "not found"
        state.num_read += 1
        return "done" if state.num_read == NUM_NOTES else f"Please read the note {task.names[state.num_read]}."

    @rf.stop
    def has_read_all(self, state: SimpleNamespace) -> bool:
        """Stop at the end of the trail."""
        return state.num_read == NUM_NOTES

    @rf.reward
    def notes_read(self, state: SimpleNamespace) -> float:
        """The share of the notes that were read in their order."""
        return state.num_read / NUM_NOTES
