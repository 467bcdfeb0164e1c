"""How loaded an engine is, read from the metrics it publishes, whichever engine it is."""

import re
from typing import NamedTuple

CACHE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
QUEUE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)


RUNNING = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)


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
