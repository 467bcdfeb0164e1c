"""Starts and supervises all processes of a run.

A run has several processes that may die independently. The launch plan lists them, with their cores, GPUs and ports,
and can be printed before anything starts (`--dry-run`). The supervisor starts the processes of the plan, restarts them
when they crash, and leaves none behind.
"""
