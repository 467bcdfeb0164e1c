"""Whether something answers at an address."""

import asyncio
import contextlib
from urllib.parse import urlsplit

import httpx

PATIENCE = 2.0  # seconds for one answer


async def answers(address: str) -> bool:
    """`http://...`: it says 200. `tcp://...`: it takes a connection."""
    if address.startswith("http"):
        try:
            async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False, verify=False) as http:
                return (await http.get(address)).status_code == 200
        except httpx.HTTPError:
            return False
    place = urlsplit(address)
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_connection(place.hostname, place.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
