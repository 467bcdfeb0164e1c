"""Whether a process answers at its address."""

import asyncio

from ramify.wire.address import is_listening

RESPONSE_TIMEOUT = 2.0  # seconds for one answer


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT) -> bool:
    """`http://...`: it says 200 within `patience` seconds. `tcp://...`: it takes a connection."""
    if not address.startswith("http"):
        return await is_listening(address)
    from ramify.client.http_client import HttpClient, RequestFailed  # loaded only where an HTTP address is probed

    try:
        async with asyncio.timeout(timeout), HttpClient(address, connect_timeout=timeout, max_connections=1) as http:
            return (await http.request("GET", "")).status == 200
    except (RequestFailed, TimeoutError):
        return False
