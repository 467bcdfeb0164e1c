"""Fencing: two copies of a process may both run for a while, but they never both count.

A partitioned or paused process lives on beside its replacement, and nobody can tell it to stop. Therefore every effect
is checked against a `token`, which grows with each replacement. A `lease` bounds how long two copies overlap; it saves
resources and is not needed for correctness. `head_log` orders the heads of a run that was moved to another machine.
The classes do no I/O of their own and get the time as an argument, so that a simulation can run them unchanged.
`docs/design/fencing.md` has the argument.
"""
