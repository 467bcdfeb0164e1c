"""Child processes: start them, watch them, stop them with all their descendants.

A process of Ramify may be killed at any time (`kill -9`, out of memory), and its children must not outlive it. So a
`ChildProcess` runs under a `watcher`, a small process that notices the death of its parent. `child` starts and stops
one child. `prefork` forks several from one process that has imported what they share; the kernel kills that one with
its parent. `program` runs a short program with a timeout. This package does not import torch.
"""
