"""Counters of the engine: one flat object, written by the engine's thread and read by any thread."""

from dataclasses import dataclass, fields


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

    def to_prometheus(self, gauges: dict[str, float]) -> str:
        """Return the counters and `gauges` in the Prometheus text format."""
        lines: list[str] = []
        for item in fields(self):
            name = f"ramify_{item.name}_total"
            lines += [f"# TYPE {name} counter", f"{name} {getattr(self, item.name)}"]
        for key, value in gauges.items():
            lines += [f"# TYPE ramify_{key} gauge", f"ramify_{key} {value:.10g}"]
        return "\n".join(lines) + "\n"
