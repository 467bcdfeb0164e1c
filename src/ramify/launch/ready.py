"""Whether something answers at an address."""

import asyncio
import contextlib
from urllib.parse import urlsplit

import httpx

PATIENCE = 2.0  # seconds for one answer
PORTS = {"http": 80, "https": 443}


async def answers(address: str) -> bool:
    """`http://...`: it says 200. `tcp://...`: it takes a connection."""
    if not address.startswith("http"):
        return await listens(address)
    try:
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False, verify=False) as http:
            return (await http.get(address)).status_code == 200
    except httpx.HTTPError:
        return False


async def listens(address: str) -> bool:
    """Whether it takes a connection, whatever it speaks."""
    place = urlsplit(address)
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(place.hostname, place.port or PORTS.get(place.scheme))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
