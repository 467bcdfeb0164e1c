"""One rollout of one agent: a header of plain data and a graph of messages.

`Trace` owns the columns; `Node` and `Branch` are views that consist of a trace and an index. Derived values (reward,
branches, turns, lengths) are computed on access and never stored or sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import OperationInvalid
from ramify.trace.columns import Float32Array, Int32Array, concat_ranges, make_readonly
from ramify.trace.graph import MessageGraph
from ramify.trace.header import FIELD_TYPES, TraceHeader, validate_field
from ramify.trace.message import Media, MediaRef, Message, ModelCall, VersionSpan
from ramify.trace.plain_data import to_plain


class _TurnCounts:
    """Properties of a trace and of a branch that follow from its nodes."""

    __slots__ = ()

    @property
    def nodes(self) -> "Sequence[Node]":
        """The nodes."""
        raise NotImplementedError

    def _get_finish_reasons(self) -> Sequence[str | None]:
        """Return why the model call of each node ended; None for a node without one."""
        raise NotImplementedError

    @property
    def num_turns(self) -> int:
        """The number of model calls."""
        return sum(reason is not None for reason in self._get_finish_reasons())

    @property
    def has_response(self) -> bool:
        """Whether the reply of the last model call has content."""
        pairs = zip(reversed(self.nodes), reversed(self._get_finish_reasons()))
        reply = next((node.message for node, reason in pairs if reason is not None), None)
        return reply is not None and bool(reply.content)


class Trace(_TurnCounts, TraceHeader, kw_only=True, eq=False):
    """A rollout of one agent: a header of plain data, which is checked when it is set, and a tree of messages.

    - `id`: the id of the trace; `episode`, `group`: the ids of the attempt and of its group.
    - `attempt`: the number of the attempt in its group; `agent`: the name of the agent; `env`: the name of the source.
    - `task`: the task as plain data.
    - `rewards`: (score, weight) of each reward by name; None if the reward function did not run.
    - `metrics`: the metrics by name.
    - `info`: further values of the environment, by key. They are stored with the trace.
    - `errors`: the failures of the rollout.
    - `stop`: why the rollout ended.
    - `timing`: the seconds spent in each phase.
    - `harness`, `runtime`, `sampler`: the options with which the rollout ran.
    - `graph`: the messages and their tokens as columns; `nodes` and `branches` are views of it.
    """

    graph: MessageGraph = msgspec.field(default_factory=MessageGraph)

    def __post_init__(self) -> None:
        set_field = super().__setattr__
        for name in FIELD_TYPES:
            set_field(name, validate_field(name, getattr(self, name)))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, validate_field(name, value) if name in FIELD_TYPES else value)

    @property
    def header(self) -> TraceHeader:
        """A copy of the header, checked again: lists and structs in it may have changed since they were set."""
        return TraceHeader(
            **{name: validate_field(name, getattr(self, name)) for name in TraceHeader.__struct_fields__}
        )

    @property
    def nodes(self) -> "Sequence[Node]":
        """All nodes, in arrival order."""
        return _NodeSequence(self)

    def _get_finish_reasons(self) -> Sequence[str | None]:
        return self.graph.finish_reasons

    @property
    def leaves(self) -> list[int]:
        """The nodes without children, in arrival order."""
        is_leaf = np.ones(len(self.graph), bool)
        parents = self.graph.nodes.view["parent"]
        is_leaf[parents[parents >= 0]] = False
        return np.flatnonzero(is_leaf).tolist()

    @property
    def branches(self) -> "list[Branch]":
        """One branch per leaf: the path from its root."""
        return [Branch(self, leaf) for leaf in self.leaves]

    def flatten(self) -> "list[FlatBranch]":
        """Return every branch as separate arrays, for code without trees; shared prefixes are repeated."""
        return _flatten_paths(self.graph, self.leaves)

    def exclude_from_training(self, node: int, reason: str) -> None:
        """Exclude a call from training, and add the reason to `info["untrained"]`; the first reason stays."""
        if not self.nodes[node].is_trainable:
            return
        self.graph.nodes.view["trainable"][node] = False
        self.info["untrained"] = [*self.info.get("untrained", []), {"node": node, "reason": reason}]

    @property
    def sampled_nodes(self) -> list[int]:
        """The nodes with tokens that the policy sampled, in arrival order."""
        table = self.graph.nodes.view
        return np.flatnonzero(table["sampled_stop"] > table["sampled_start"]).tolist()

    @property
    def reward(self) -> float | None:
        """The weighted sum of the rewards; None if there are none, or if one of them did not run."""
        total = 0.0
        for reward in self.rewards.values():
            if reward is None:
                return None
            total += reward[0] * reward[1]
        return total if self.rewards else None

    @property
    def completion_len(self) -> int:
        """The number of tokens that the policy sampled; a token that several branches share counts once."""
        return self.graph.logprobs.size

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all nodes; a token that several branches share counts once."""
        return self.graph.tokens.size

    @property
    def is_truncated(self) -> bool:
        """Whether a model call was stopped by its length limit."""
        return "length" in self._get_finish_reasons()

    @property
    def last_reply(self) -> str:
        """The text of the last assistant message, or "". A harness may report another one in `info["final_answer"]`."""
        if isinstance(answer := self.info.get("final_answer"), str):
            return answer
        return next((node.message.text for node in reversed(self.nodes) if node.message.role == "assistant"), "")

    def detach_images(self) -> list[Media]:
        """Remove the bytes of images from the media table, and return the images. Their hashes stay in the table."""
        table = self.graph.media
        images = [media for media in table if media.data and media.mime.startswith("image/")]
        detached = {media.hash for media in images}
        table[:] = [msgspec.structs.replace(media, data=b"") if media.hash in detached else media for media in table]
        return images

    def add_media(self, media: Media) -> int:
        """Add `media` to the media table unless it has an entry with the same hash, and return its index."""
        for name, expected in {"hash": str, "mime": str, "data": bytes}.items():
            value = getattr(media, name)
            if not isinstance(value, expected):
                raise OperationInvalid(
                    f"media.{name}: expected {expected.__name__}, found a {type(value).__qualname__}"
                )
        to_plain([media.hash, media.mime], "media")
        if not media.has_valid_hash:
            raise OperationInvalid(f"media.hash: expected the SHA-256 of its data, found {media.hash!r:.80}")
        table = self.graph.media
        for index, entry in enumerate(table):
            if entry.hash == media.hash:
                return index
        table.append(media)
        return len(table) - 1


@dataclass(slots=True, frozen=True)
class Node:
    """A view of one node of a trace."""

    trace: Trace
    index: int

    @property
    def parent(self) -> int:
        """The index of the parent node; -1 for a root."""
        return int(self.trace.graph.nodes.view["parent"][self.index])

    @property
    def message(self) -> Message:
        """The message."""
        return self.trace.graph.read_record(self.index).message

    @property
    def call(self) -> ModelCall | None:
        """The model call that produced the message; None for other messages."""
        return self.trace.graph.read_record(self.index).call

    @property
    def token_ids(self) -> Int32Array:
        """The token ids, including the chat template's."""
        graph = self.trace.graph
        return make_readonly(graph.tokens.view[graph.token_start(self.index) : graph.token_stop(self.index)])

    @property
    def sampled_span(self) -> tuple[int, int]:
        """The range [start, stop) of the tokens that the policy sampled."""
        return self._span("sampled")

    @property
    def content_span(self) -> tuple[int, int]:
        """The range [start, stop) of the tokens of the message's content, without the chat template."""
        return self._span("content")

    @property
    def logprobs(self) -> Float32Array:
        """The sampler's logprobs of the sampled tokens."""
        stops = self.trace.graph.nodes.view["logprobs_stop"]
        return make_readonly(
            self.trace.graph.logprobs.view[stops[self.index - 1] if self.index else 0 : stops[self.index]]
        )

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The weight versions of the sampled tokens."""
        return self.trace.graph.version_spans(self.index)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The media references of the message."""
        return self.trace.graph.node_media(self.index)

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Extra arrays with one entry per token or per sampled token."""
        return self.trace.graph.arrays.get(self.index, {})

    @property
    def is_trainable(self) -> bool:
        """Whether the node may be trained with a policy gradient."""
        return bool(self.trace.graph.nodes.view["trainable"][self.index])

    @property
    def children(self) -> list[int]:
        """The indices of the child nodes."""
        return self.trace.graph.children(self.index)

    def _span(self, name: str) -> tuple[int, int]:
        row = self.trace.graph.nodes.view[self.index]
        return int(row[f"{name}_start"]), int(row[f"{name}_stop"])


class FlatBranch(NamedTuple):
    """A branch as arrays with one entry per token; `logprobs` is NaN where the policy did not sample the token."""

    token_ids: Int32Array
    sampled_mask: npt.NDArray[np.bool_]
    logprobs: Float32Array


def _flatten_paths(graph: MessageGraph, leaves: Sequence[int]) -> list[FlatBranch]:
    """Return the path to each of these nodes as separate arrays."""
    table = graph.nodes.view
    starts = np.append(np.int32(0), table["stop"])[:-1] + table["sampled_start"]
    sampled = concat_ranges(starts, table["sampled_stop"] - table["sampled_start"])
    mask, logprobs = np.zeros(graph.tokens.size, bool), np.full(graph.tokens.size, np.nan, np.float32)
    mask[sampled], logprobs[sampled] = True, graph.logprobs.view
    columns: list[npt.NDArray[Any]] = [graph.tokens.view, mask, logprobs]
    branches: list[FlatBranch] = []
    for leaf in leaves:
        path = graph.path_slices(leaf)
        branches.append(FlatBranch(*(np.concatenate([column[part] for part in path]) for column in columns)))
    return branches


@dataclass(slots=True, frozen=True)
class Branch(_TurnCounts):
    """One conversation as the model saw it: the path from a root to the node `leaf`, which may be any node.

    - `trace`: the trace.
    - `leaf`: the index of the last node of the path.
    """

    trace: Trace
    leaf: int

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the path, root first."""
        return [Node(self.trace, index) for index in self.trace.graph.path_nodes(self.leaf)]

    def _get_finish_reasons(self) -> list[str | None]:
        reasons = self.trace.graph.finish_reasons
        return [reasons[index] for index in self.trace.graph.path_nodes(self.leaf)]

    @property
    def messages(self) -> list[Message]:
        """The messages of the path."""
        return [node.message for node in self.nodes]

    @property
    def token_ids(self) -> Int32Array:
        """The token ids of the path."""
        return self.trace.graph.path_tokens(self.leaf)

    @property
    def sampled_mask(self) -> npt.NDArray[np.bool_]:
        """For each token whether the policy sampled it."""
        return self._flatten().sampled_mask

    @property
    def logprobs(self) -> Float32Array:
        """The sampler's logprob of each token, NaN where the policy did not sample it."""
        return self._flatten().logprobs

    def _flatten(self) -> FlatBranch:
        return _flatten_paths(self.trace.graph, [self.leaf])[0]

    @property
    def completion_len(self) -> int:
        """The number of tokens on the path that the policy sampled."""
        rows = self.trace.graph.nodes.view[self.trace.graph.path_nodes(self.leaf)]
        return int((rows["sampled_stop"] - rows["sampled_start"]).sum())

    @property
    def total_tokens(self) -> int:
        """The number of tokens on the path, the same as `len(branch)`."""
        return len(self)

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
        indices = range(len(self))[index]
        return Node(self._trace, indices) if isinstance(indices, int) else [Node(self._trace, i) for i in indices]


@dataclass(slots=True, frozen=True)
class Episode:
    """The result of one attempt: one trace per agent, usually one."""

    traces: tuple[Trace, ...]

    def __post_init__(self) -> None:
        keys = {(trace.episode, trace.group, trace.attempt) for trace in self.traces}
        if len(keys) != 1:
            raise OperationInvalid(
                f"the traces of an episode must share episode, group and attempt, found {sorted(keys)}"
            )
        agents = [trace.agent for trace in self.traces]
        if len(set(agents)) < len(agents):
            raise OperationInvalid(f"the traces of an episode must be of different agents, found {agents}")
