"""How the tasks of `repair` are made: `python -m tools.repair` writes their test cases and bugs."""
