"""The trace: a rollout as a tree of messages, and the forest of token trees that is trained.

A `Trace` records what was sampled; `build_forest`, `split_forest`, `pack_trees` and `balance_packs` turn traces into
the packs that a trainer computes. Requires only numpy and msgspec.
"""

from ramify.trace.annotation import AnnotatedTrace, Annotation
from ramify.trace.codec import decode_episode, decode_trace, encode_episode, encode_trace
from ramify.trace.delta import TraceDeltaDecoder, TraceDeltaEncoder
from ramify.trace.forest import (
    DroppedTargets,
    Forest,
    MediaSpan,
    PolicyVersion,
    Targets,
    concat_forests,
    make_padding_forest,
)
from ramify.trace.forest_builder import build_forest
from ramify.trace.header import TRACE_SCHEMA, Timing
from ramify.trace.json_view import to_json
from ramify.trace.message import (
    Media,
    MediaPart,
    MediaRef,
    Message,
    ModelCall,
    TextPart,
    ToolCall,
    Usage,
    VersionRun,
)
from ramify.trace.packing import balance_packs, pack_trees, split_forest
from ramify.trace.trace import Branch, Episode, FlatBranch, Node, Trace
from ramify.trace.turn import MessageSpan, PromptMedia, TraceBuilder, Turn

__all__ = [
    "TRACE_SCHEMA",
    "AnnotatedTrace",
    "Annotation",
    "Branch",
    "DroppedTargets",
    "Episode",
    "FlatBranch",
    "Forest",
    "Media",
    "MediaPart",
    "MediaRef",
    "MediaSpan",
    "Message",
    "MessageSpan",
    "ModelCall",
    "Node",
    "PolicyVersion",
    "PromptMedia",
    "Targets",
    "TextPart",
    "Timing",
    "ToolCall",
    "Trace",
    "TraceBuilder",
    "TraceDeltaDecoder",
    "TraceDeltaEncoder",
    "Turn",
    "Usage",
    "VersionRun",
    "balance_packs",
    "build_forest",
    "concat_forests",
    "decode_episode",
    "decode_trace",
    "encode_episode",
    "encode_trace",
    "make_padding_forest",
    "pack_trees",
    "split_forest",
    "to_json",
]
