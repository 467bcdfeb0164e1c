"""The orchestrator: issues groups, scores them, forms batches, and keeps the weights of the engines up to date.

All decisions are made by small state machines without clock or I/O (admission, attempt queue, group tracker, source
mix). Every decision is written to the ledger before it is executed, so a crash loses nothing. Nothing here imports
torch or an environment.
"""
