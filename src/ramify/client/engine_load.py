"""How loaded an engine is, read from the metrics it publishes, whichever engine it is."""

import re
from typing import NamedTuple

KV_USAGE_RE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_WAITING_RE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_RUNNING_RE = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_STEPS_RE = re.compile(
    r"^(?:ramify_steps_total|vllm:iteration_tokens_total_count|vllm:generation_tokens_total)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


class EngineLoad(NamedTuple):
    """The share of the cache that is in use, requests that wait, and requests that are worked on."""

    kv_usage: float = 0.0
    num_waiting: int = 0
    num_running: int = 0


def parse_load(metrics: str) -> EngineLoad:
    """What the metrics say; nothing said is nothing in use."""
    cache = max(map(float, KV_USAGE_RE.findall(metrics)), default=0.0)
    queued, running = (int(sum(map(float, name.findall(metrics)))) for name in (NUM_WAITING_RE, NUM_RUNNING_RE))
    return EngineLoad(cache, queued, running)


def parse_num_steps(metrics: str) -> float | None:
    """Return a number that grows with every step of the engine; None if its metrics have no such number."""
    counters = [float(value) for value in NUM_STEPS_RE.findall(metrics)]
    return sum(counters) if counters else None
