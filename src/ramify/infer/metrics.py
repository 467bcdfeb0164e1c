"""Counters of the engine: one flat object, written by the engine's thread and read by any thread."""

from dataclasses import dataclass, fields
from typing import Literal

EngineActivity = Literal["sampling", "training", "swap", "idle"]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. The field names are part of the Prometheus names."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    expired: int = 0
    steps: int = 0
    replayed_steps: int = 0  # run as CUDA graphs
    shared_keys: int = 0  # keys of common prefixes that a plan reads once, times the requests that do not read them
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    encoded_images: int = 0  # images that the vision tower encoded
    prefill_chunks: int = 0  # chunks that did not finish their prefill
    mixed_steps: int = 0  # prefill and decoding in one forward
    duplicate_blocks: int = 0  # full blocks that were computed although they were cached
    snapshots: int = 0  # of recurrent states
    snapshot_hits: int = 0  # requests that continued from a snapshot
    snapshot_evictions: int = 0  # snapshots that another one replaced
    preemptions: int = 0
    evictions: int = 0
    swaps: int = 0
    swaps_refused: int = 0
    recomputes: int = 0  # requests that a weight swap put back in the queue
    kept: int = 0  # requests that kept their keys and values in a weight swap
    # How the engine's thread spends its time. The four add up to the time since its start.
    sampling_seconds: float = 0.0
    training_seconds: float = 0.0  # it waits while a trainer computes on the same GPU
    swap_seconds: float = 0.0  # weight swaps and other commands
    idle_seconds: float = 0.0  # there is no request, or the engine is paused or has no weights

    def add_seconds(self, activity: EngineActivity, seconds: float) -> None:
        """Add to the time that the engine's thread spends with an activity."""
        name = f"{activity}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def to_prometheus(self, gauges: dict[str, float]) -> str:
        """Return the counters and `gauges` in the Prometheus text format."""
        lines: list[str] = []
        for item in fields(self):
            name = f"ramify_{item.name}_total"
            lines += [f"# TYPE {name} counter", f"{name} {getattr(self, item.name)}"]
        for key, value in gauges.items():
            lines += [f"# TYPE ramify_{key} gauge", f"ramify_{key} {value:.10g}"]
        return "\n".join(lines) + "\n"
