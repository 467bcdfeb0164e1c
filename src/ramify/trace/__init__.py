"""The trace: a rollout as a tree of messages, and the forest that trains it.

A `Trace` holds what the sampler did; `grow`, `cut`, `pack` and `balance` turn traces into the rows a trainer computes.
Needs numpy and msgspec alone.
"""

from ramify.trace.annotation import Annotation, Sample
from ramify.trace.codec import decode, decode_episode, encode, encode_episode
from ramify.trace.cutting import cut
from ramify.trace.delta import TraceReader, TraceWriter
from ramify.trace.forest import Dropped, Forest, MediaSpan, Targets, Version, concat, filler
from ramify.trace.growing import grow
from ramify.trace.message import (
    Call,
    Media,
    MediaPart,
    MediaRef,
    Message,
    TextPart,
    ToolCall,
    Usage,
    VersionRun,
)
from ramify.trace.packing import balance, pack
from ramify.trace.readable import to_json
from ramify.trace.trace import SCHEMA, Branch, Episode, Flat, Node, Timing, Trace
from ramify.trace.turn import PlacedMedia, Span, Turn, TurnBuilder

__all__ = [
    "SCHEMA",
    "Annotation",
    "Branch",
    "Call",
    "Dropped",
    "Episode",
    "Flat",
    "Forest",
    "Media",
    "MediaPart",
    "MediaRef",
    "MediaSpan",
    "Message",
    "Node",
    "PlacedMedia",
    "Sample",
    "Span",
    "Targets",
    "TextPart",
    "Timing",
    "ToolCall",
    "Trace",
    "TraceReader",
    "TraceWriter",
    "Turn",
    "TurnBuilder",
    "Usage",
    "Version",
    "VersionRun",
    "balance",
    "concat",
    "cut",
    "decode",
    "decode_episode",
    "encode",
    "encode_episode",
    "filler",
    "grow",
    "pack",
    "to_json",
]
