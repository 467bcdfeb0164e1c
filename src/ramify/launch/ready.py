"""Whether a process answers at its address."""

from ramify.wire.address import is_listening

RESPONSE_TIMEOUT = 2.0  # seconds for one answer


async def is_responding(address: str, *, timeout: float = RESPONSE_TIMEOUT) -> bool:
    """`http://...`: it says 200 within `patience` seconds. `tcp://...`: it takes a connection."""
    if not address.startswith("http"):
        return await is_listening(address)
    import httpx  # loaded where somebody is asked

    try:
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as http:
            return (await http.get(address)).status_code == 200
    except httpx.HTTPError:
        return False
