"""The status server answers every client, but web pages cannot stop the run."""

import httpx

from ramify.orchestrate.status import build_status_server


async def test_web_page_cannot_stop_a_run():
    stops: list[None] = []
    server = build_status_server(
        "http://127.0.0.1:0",
        {"/status": lambda _: {"step": 3}},
        lambda: stops.append(None),
        allowed_hosts=["run.lab.example"],
    )
    async with server, httpx.AsyncClient(base_url=server.address) as http:
        for headers in ({"Origin": "http://page.example"}, {"Host": "page.example"}):
            response = await http.post("/stop", headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (403, "PeerRefused")
            assert "orchestrator.allowed_hosts" in response.text or "web page" in response.text
        assert stops == []
        for headers in ({}, {"Host": "run.lab.example:8000"}, {"Host": "localhost"}):
            assert (await http.post("/stop", headers=headers)).json() == {"stopping": True}
        assert len(stops) == 3
        assert (await http.get("/status")).json() == {"step": 3}
