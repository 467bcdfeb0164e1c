"""How loaded an engine is, read from the metrics it publishes, whichever engine it is."""

import re
from typing import NamedTuple

CACHE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
QUEUE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)
RUNNING = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)
STEPS = re.compile(
    r"^(?:ramify_steps_total|vllm:iteration_tokens_total_count|vllm:generation_tokens_total)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


class Load(NamedTuple):
    """The share of the cache that is in use, requests that wait, and requests that are worked on."""

    cache: float = 0.0
    queued: int = 0
    running: int = 0


def read_load(text: str) -> Load:
    """What the metrics say; nothing said is nothing in use."""
    cache = max(map(float, CACHE.findall(text)), default=0.0)
    queued, running = (int(sum(map(float, name.findall(text)))) for name in (QUEUE, RUNNING))
    return Load(cache, queued, running)


def read_steps(text: str) -> float | None:
    """Return a number that grows with every step of the engine; None if its metrics have no such number."""
    counters = [float(value) for value in STEPS.findall(text)]
    return sum(counters) if counters else None
