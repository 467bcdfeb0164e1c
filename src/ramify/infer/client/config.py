"""Configuration of the inference client."""

from pydantic import Field

from ramify.core.config import Config


class ClientConfig(Config):
    """Timeouts and limits. The defaults fit servers on the same host or in the same rack."""

    connect_timeout: float = Field(default=5.0, gt=0)
    """Seconds to open a connection. A server that takes longer is ejected."""
    connections: int = Field(default=1024, ge=1)
    """The maximal number of connections to one server. Further requests wait for one, within their timeout."""
    health_interval: float = Field(default=1.0, gt=0)
    """Seconds between two health checks of a server."""
    health_timeout: float = Field(default=5.0, gt=0)
    """Seconds a health check may take."""
    eject_after: int = Field(default=3, ge=1)
    """Failed health checks in a row after which a server is ejected."""
    stall_after: float = Field(default=5.0, gt=0)
    """Seconds without a sign of progress after which an engine counts as stalled; at least twice `health_interval`."""
    server_wait_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a request waits for a healthy server when there is none."""
    retries: int = Field(default=5, ge=0)
    """How often a request is sent again after status 5xx, or after its response was lost if the caller allows it."""
    backoff: float = Field(default=0.5, gt=0)
    """Seconds before a request is sent again when every server refused it; doubled each time, up to 16 times this."""
    control_timeout: float = Field(default=120.0, gt=0)
    """Seconds for pausing, resuming, updating or probing a server."""

    @property
    def stall_tolerance(self) -> float:
        """Seconds without progress that are not a stall: progress is only checked every `health_interval` seconds."""
        return max(self.stall_after, 2 * self.health_interval)
