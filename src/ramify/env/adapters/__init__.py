"""Environments of other projects, unmodified, as tasksets.

Each adapter is a package of its own with an extra of its own. It uses only the public names of `ramify`. What it adapts
is imported when the taskset is created, in the interpreter that the source names.
"""
