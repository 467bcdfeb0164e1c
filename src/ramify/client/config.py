"""How the client treats its servers."""

from pydantic import Field

from ramify.config import Config


class ClientConfig(Config):
    """Waits and limits. The defaults fit servers on the same host or in the same rack."""

    connect_timeout: float = Field(default=5.0, gt=0)
    """Seconds to open a connection; a server that takes longer is ejected."""
    connections: int = Field(default=1024, ge=1)
    """Connections to one server; more requests wait for one, within their deadline."""
    health_interval: float = Field(default=1.0, gt=0)
    """Seconds between two looks at a server's health."""
    health_timeout: float = Field(default=5.0, gt=0)
    """Seconds a health check may take."""
    eject_after: int = Field(default=3, ge=1)
    """Failed health checks in a row that eject a server."""
    stall_after: float = Field(default=5.0, gt=0)
    """Seconds without a sign of progress after which an engine counts as stalled; at least twice `health_interval`."""
    patience: float = Field(default=30.0, gt=0)
    """Seconds a request waits for a healthy server when there is none."""
    retries: int = Field(default=5, ge=0)
    """How often a request is sent again after 503 (or after its answer was lost, where the caller allows it)."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before a request is sent again when every server is full; doubled each time, up to 16 times this."""
    control_deadline: float = Field(default=120.0, gt=0)
    """Seconds for pausing, resuming, updating and probing a server."""

    @property
    def stall_tolerance(self) -> float:
        """Seconds without progress that are no stall: progress is only looked for every `health_interval` seconds."""
        return max(self.stall_after, 2 * self.health_interval)
