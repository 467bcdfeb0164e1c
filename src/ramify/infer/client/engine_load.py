"""The load of an engine, parsed from its Prometheus metrics."""

import re
from typing import NamedTuple

KV_USAGE_RE = re.compile(r"^(?:ramify_kv_usage|vllm:kv_cache_usage_perc)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_WAITING_RE = re.compile(r"^(?:ramify_waiting|vllm:num_requests_waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)
NUM_RUNNING_RE = re.compile(r"^(?:ramify_running|vllm:num_requests_running)(?:{[^}]*})? (\S+)$", re.MULTILINE)
IDEAL_SECONDS_RE = re.compile(r"^ramify_ideal_seconds (\S+)$", re.MULTILINE)
NUM_STEPS_RE = re.compile(
    r"^(?:ramify_steps_total|vllm:iteration_tokens_total_count|vllm:generation_tokens_total)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


class EngineLoad(NamedTuple):
    """The share of the KV cache in use, and the numbers of waiting and running requests.

    `ideal_seconds` is the least time that the device needs for all steps so far; None if that is unknown.
    """

    kv_usage: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    ideal_seconds: float | None = None


def parse_load(metrics: str) -> EngineLoad:
    """Parse the load from Prometheus text; a missing metric counts as 0."""
    kv_usage = max(map(float, KV_USAGE_RE.findall(metrics)), default=0.0)
    num_waiting, num_running = (
        int(sum(map(float, pattern.findall(metrics)))) for pattern in (NUM_WAITING_RE, NUM_RUNNING_RE)
    )
    ideal_seconds = IDEAL_SECONDS_RE.search(metrics)
    return EngineLoad(kv_usage, num_waiting, num_running, float(ideal_seconds[1]) if ideal_seconds else None)


def parse_num_steps(metrics: str) -> float | None:
    """Return a counter that grows with every step of the engine; None if its metrics have none."""
    counters = [float(value) for value in NUM_STEPS_RE.findall(metrics)]
    return sum(counters) if counters else None
