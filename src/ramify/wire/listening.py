"""Why an address cannot be listened on, under its name. Importable without ZMQ."""

import errno

from ramify.errors import ConfigInvalid, PortTaken, RamifyError


def not_listening(what: str, address: str, number: int | None, why: str) -> RamifyError:
    """The failure of `what` that should listen at `address`, by the system's number and words for it.

    A port that is taken may be free again; anything else is as wrong the next time.
    """
    if number == errno.EADDRNOTAVAIL:
        why = f"{address.rpartition('://')[2].rpartition(':')[0]} is no address of this machine"
    said = f"{what}: {address} cannot be listened on: {why}"
    return PortTaken(said) if number == errno.EADDRINUSE else ConfigInvalid(said)
