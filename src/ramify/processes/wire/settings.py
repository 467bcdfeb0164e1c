"""Timeouts and limits of a connection."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireSettings:
    """Timeouts and limits of a connection. Each side uses its own; they are not negotiated."""

    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats."""
    server_timeout: float = 10.0
    """Seconds of silence after which a client fails its pending calls with PeerLost."""
    session_timeout: float = 30.0
    """Seconds of silence after which a server closes a client's session and cancels its requests."""
    max_open_requests: int = 8192
    """The maximum number of open requests per client and per server; further ones fail with QueueFull."""
    max_frame_bytes: int = 1 << 30
    """The maximum size of a frame; a client that sends a larger one is disconnected."""
    max_unacked_bytes: int = 1 << 30
    """The maximum of bytes that a client has not acknowledged; above a quarter of it, streamed parts are skipped."""
    max_clients: int = 1024
    """The maximum number of sessions of a server."""
