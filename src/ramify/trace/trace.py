"""One rollout of one agent: a header of plain data and a graph of messages.

`Trace` owns the columns; `Node` and `Branch` are views that know a trace and an index and hold nothing. What can be
computed (reward, branches, turns, lengths) is computed when asked for and never stored or sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast, overload

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import Failure, TraceInvalid, ValueRefused
from ramify.trace.columns import Float32Array, Int32Array, concat_ranges, make_readonly
from ramify.trace.graph import MessageGraph
from ramify.trace.message import Media, MediaRef, Message, ModelCall, VersionRun
from ramify.trace.plain_data import CheckedDict, check_number, check_reward, to_plain

TRACE_SCHEMA = 1

WeightedScore = tuple[float, float] | None
S = TypeVar("S", bound=np.generic)


class Timing(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Seconds spent in each phase of a rollout, and `stalled`, waiting for an engine that made no progress."""

    boot: float = 0.0
    setup: float = 0.0
    model: float = 0.0
    harness: float = 0.0
    finalize: float = 0.0
    scoring: float = 0.0
    stalled: float = 0.0


class TraceHeader(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a trace says about the rollout as a whole; all of it plain data, readable without the environment."""

    id: str
    episode: str = ""
    group: str = ""
    attempt: int = 0
    agent: str = ""
    env: str = ""
    task: dict[str, Any] = {}  # the task's wire form
    rewards: dict[str, WeightedScore] = {}  # (score, weight); None was due and did not run
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}
    errors: list[Failure] = []
    stop: str = ""
    timing: Timing = msgspec.field(default_factory=Timing)
    harness: dict[str, Any] = {}
    runtime: dict[str, Any] = {}
    sampler: dict[str, Any] = {}


_PLAIN_FIELDS = ("task", "info", "harness", "runtime", "sampler")
_FIELD_CHECKS = {"rewards": check_reward, "metrics": check_number} | dict.fromkeys(_PLAIN_FIELDS, to_plain)
_STR_FIELDS = ("id", "episode", "group", "agent", "env", "stop")
_FIELD_TYPES: dict[str, Any] = {
    **dict.fromkeys(_STR_FIELDS, str),
    **dict.fromkeys(_FIELD_CHECKS, Mapping),
    "attempt": int,
    "timing": Timing,
    "errors": list,
}


class Trace(TraceHeader, kw_only=True, eq=False):
    """A rollout: the header's fields, checked as they are set, and the message graph."""

    graph: MessageGraph = msgspec.field(default_factory=MessageGraph)

    def __post_init__(self) -> None:
        for name in _FIELD_TYPES:
            setattr(self, name, getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, _validate_field(name, value) if name in _FIELD_TYPES else value)

    @property
    def header(self) -> TraceHeader:
        """A copy of the header, checked once more: lists and records inside it may have changed since they were set."""
        return TraceHeader(
            **{name: _validate_field(name, getattr(self, name)) for name in TraceHeader.__struct_fields__}
        )

    @property
    def nodes(self) -> Sequence[Node]:
        return _NodeSequence(self)

    @property
    def leaves(self) -> list[int]:
        """Nodes that nothing continues, in arrival order."""
        alone = np.ones(len(self.graph), bool)
        parents = self.graph.nodes.view["parent"]
        alone[parents[parents >= 0]] = False
        return np.flatnonzero(alone).tolist()

    @property
    def branches(self) -> list[Branch]:
        return [Branch(self, leaf) for leaf in self.leaves]

    def flatten(self) -> list[FlatBranch]:
        """Every branch as arrays of its own, for whoever knows no trees; shared prefixes are repeated."""
        graph = self.graph
        table = graph.nodes.view
        starts = np.append(np.int32(0), table["stop"])[:-1] + table["sampled_start"]
        sampled = concat_ranges(starts, table["sampled_stop"] - table["sampled_start"])
        mask, logprobs = np.zeros(graph.tokens.size, bool), np.full(graph.tokens.size, np.nan, np.float32)
        mask[sampled], logprobs[sampled] = True, graph.logprobs.view
        ids: Int32Array = graph.tokens.view
        paths = (graph.path_slices(leaf) for leaf in self.leaves)
        return [
            FlatBranch(_concat_slices(ids, path), _concat_slices(mask, path), _concat_slices(logprobs, path))
            for path in paths
        ]

    def exclude_from_training(self, node: int, reason: str) -> None:
        """Exclude a call from training, and add the reason to `info["untrained"]`."""
        self.graph.nodes.view["trainable"][node] = False
        self.info["untrained"] = [*self.info.get("untrained", []), {"node": node, "reason": reason}]

    @property
    def sampled_nodes(self) -> list[int]:
        """Nodes that the policy sampled."""
        table = self.graph.nodes.view
        return np.flatnonzero(table["sampled_stop"] > table["sampled_start"]).tolist()

    @property
    def reward(self) -> float | None:
        """The weighted sum of the rewards; None while one of them is due, and where there is none at all."""
        if not self.rewards or any(entry is None for entry in self.rewards.values()):
            return None
        return float(sum(entry[0] * entry[1] for entry in self.rewards.values() if entry is not None))

    @property
    def is_truncated(self) -> bool:
        """Whether some call ended at its length limit."""
        return any(node.call is not None and node.call.finish_reason == "length" for node in self.nodes)

    @property
    def last_reply(self) -> str:
        """The text of the newest assistant message, "" if there is none."""
        return next((node.message.text for node in reversed(self.nodes) if node.message.role == "assistant"), "")

    def add_media(self, media: Media) -> int:
        """The index of `media` in the media table; equal bytes are one entry."""
        table = self.graph.media
        for index, known in enumerate(table):
            if known.hash == media.hash:
                return index
        for name, kind in {"hash": str, "mime": str, "data": bytes}.items():
            value = getattr(media, name)
            if not isinstance(value, kind):
                raise ValueRefused(f"media.{name}: expected {kind.__name__}, found a {type(value).__qualname__}")
        to_plain([media.hash, media.mime], "media")
        table.append(media)
        return len(table) - 1

    def add_node(
        self,
        parent: int,
        message: Message,
        token_ids: npt.ArrayLike = (),
        *,
        sampled_span: tuple[int, int] = (0, 0),
        content_span: tuple[int, int] = (0, 0),
        logprobs: npt.ArrayLike = (),
        versions: Sequence[VersionRun] = (),
        media: Sequence[MediaRef] = (),
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        call: ModelCall | None = None,
        trainable: bool = True,
    ) -> int:
        """Append one node as it is; `attach` is the way to record a model call."""
        return self.graph.add_node(
            parent,
            message,
            token_ids,
            sampled_span=sampled_span,
            content_span=content_span,
            logprobs=logprobs,
            versions=versions,
            media=media,
            arrays=arrays,
            call=call,
            trainable=trainable,
        )


def _validate_field(name: str, value: Any) -> Any:
    """The value of a header field as it may travel; refused naming the field and what was found."""
    kind = _FIELD_TYPES[name]
    if not isinstance(value, kind):
        raise ValueRefused(f"{name}: expected {kind.__name__}, found a {type(value).__qualname__}")
    if name in _FIELD_CHECKS:
        return CheckedDict(name, value, _FIELD_CHECKS[name])
    if isinstance(value, Timing):
        return Timing(*(check_number(getattr(value, phase), f"{name}.{phase}") for phase in Timing.__struct_fields__))
    if isinstance(value, list):
        for error in cast(list[object], value):
            if not isinstance(error, Failure):
                raise ValueRefused(f"{name}: expected Failure, found a {type(error).__qualname__}")
        return list(cast(list[Failure], value))
    return kind(to_plain(value, name))


@dataclass(slots=True, frozen=True)
class Node:
    """A view of one node: message, tokens and where they came from."""

    trace: Trace
    index: int

    @property
    def parent(self) -> int:
        return int(self.trace.graph.nodes.view["parent"][self.index])

    @property
    def message(self) -> Message:
        return self.trace.graph.read_record(self.index).message

    @property
    def call(self) -> ModelCall | None:
        return self.trace.graph.read_record(self.index).call

    @property
    def token_ids(self) -> Int32Array:
        graph = self.trace.graph
        return make_readonly(graph.tokens.view[graph.token_start(self.index) : graph.token_stop(self.index)])

    @property
    def sampled_span(self) -> tuple[int, int]:
        return self._span("sampled")

    @property
    def content_span(self) -> tuple[int, int]:
        return self._span("content")

    @property
    def logprobs(self) -> Float32Array:
        stops = self.trace.graph.nodes.view["logprobs_stop"]
        return make_readonly(
            self.trace.graph.logprobs.view[stops[self.index - 1] if self.index else 0 : stops[self.index]]
        )

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        return self.trace.graph.version_runs(self.index)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        return self.trace.graph.node_media(self.index)

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.trace.graph.arrays.get(self.index, {})

    @property
    def is_trainable(self) -> bool:
        return bool(self.trace.graph.nodes.view["trainable"][self.index])

    @property
    def children(self) -> list[int]:
        return self.trace.graph.children(self.index)

    def _span(self, name: str) -> tuple[int, int]:
        row = self.trace.graph.nodes.view[self.index]
        return int(row[f"{name}_start"]), int(row[f"{name}_stop"])


class FlatBranch(NamedTuple):
    """A branch as arrays, one entry per token; `logprobs` is NaN where the policy did not sample the token."""

    token_ids: Int32Array
    sampled_mask: npt.NDArray[np.bool_]
    logprobs: Float32Array


def _concat_slices(column: npt.NDArray[S], parts: list[slice]) -> npt.NDArray[S]:
    return np.concatenate([column[part] for part in parts])


@dataclass(slots=True, frozen=True)
class Branch:
    """A view of one path from a root to `leaf` (any node may be looked at as one)."""

    trace: Trace
    leaf: int

    @property
    def nodes(self) -> list[Node]:
        return [Node(self.trace, index) for index in self.trace.graph.path_nodes(self.leaf)]

    @property
    def messages(self) -> list[Message]:
        return [node.message for node in self.nodes]

    @property
    def token_ids(self) -> Int32Array:
        return self.trace.graph.path_tokens(self.leaf)

    @property
    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(len(self), bool)
        mask[self._sampled_indices()[0]] = True
        return mask

    @property
    def logprobs(self) -> Float32Array:
        """The sampler's logprob of each token, NaN where the policy did not sample it."""
        places, column = self._sampled_indices()
        found = np.full(len(self), np.nan, np.float32)
        found[places] = self.trace.graph.logprobs.view[column]
        return found

    def _sampled_indices(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The sampled tokens: where on the path, and where in the logprob column."""
        graph = self.trace.graph
        path = graph.path_nodes(self.leaf)
        rows = graph.nodes.view[path]
        sizes = rows["stop"] - graph.nodes.view["stop"][np.subtract(path, 1)]
        if path[0] == 0:
            sizes[0] = rows["stop"][0]
        starts = np.cumsum(sizes) - sizes + rows["sampled_start"]
        counts = rows["sampled_stop"] - rows["sampled_start"]
        return concat_ranges(starts, counts), concat_ranges(rows["logprobs_stop"] - counts, counts)

    @property
    def num_turns(self) -> int:
        return sum(node.call is not None for node in self.nodes)

    def __len__(self) -> int:
        return self.trace.graph.path_length(self.leaf)


class _NodeSequence(Sequence[Node]):
    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __len__(self) -> int:
        return len(self._trace.graph)

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        found = range(len(self))[index]
        return Node(self._trace, found) if isinstance(found, int) else [Node(self._trace, i) for i in found]

    def __iter__(self) -> Iterator[Node]:
        return (Node(self._trace, index) for index in range(len(self)))


@dataclass(slots=True, frozen=True)
class Episode:
    """What one attempt returns: one trace per agent, usually one."""

    traces: tuple[Trace, ...]

    def __post_init__(self) -> None:
        origins = {(trace.episode, trace.group, trace.attempt) for trace in self.traces}
        if len(origins) != 1:
            raise TraceInvalid(f"the traces of an episode share episode, group and attempt, found {sorted(origins)}")
        agents = [trace.agent for trace in self.traces]
        if len(set(agents)) < len(agents):
            raise TraceInvalid(f"the traces of an episode are of different agents, found {agents}")

    @property
    def id(self) -> str:
        return self.traces[0].episode
