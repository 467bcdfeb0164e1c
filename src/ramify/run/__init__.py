"""A run on disk: what it stores, and the tokens that let only one copy of a process write there."""
