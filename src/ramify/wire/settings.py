"""The times and sizes of a connection."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireSettings:
    """What both ends of a connection agree to live with; each uses its own."""

    heartbeat_interval: float = 1.0
    """Seconds between two heartbeats."""
    server_timeout: float = 10.0
    """Seconds of silence after which a client gives up what it has asked."""
    session_timeout: float = 30.0
    """Seconds of silence after which a server forgets a client and cancels what it has asked."""
    max_open_requests: int = 8192
    """Requests that may be open at a time, at either end; one more is refused."""
    max_frame_bytes: int = 1 << 30
    """Bytes of one frame; a client that sends more is cut off."""
    max_unacked_bytes: int = 1 << 30
    """Bytes that wait for one client's acknowledgement; parts of streams are left out above a quarter of it."""
    max_clients: int = 1024
