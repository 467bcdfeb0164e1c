"""The MCP server of the gateway, as a client of MCP's SDK sees it."""

import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client

import ramify as rf
from ramify.core.errors import PeerRefused, SandboxError
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.mcp_server import McpServer
from ramify.infer.gateway.request_quota import QuotaSettings
from ramify.rollout.harness import tool_client
from ramify.trace import Trace
from tests.support import mcp_server
from tests.support.attempts import OneTask, error_names, load_env, run_one
from tests.support.images import make_media
from tests.support.scenario import make_session

IMAGE = make_media(4, 4)
TEN_MB = 10_000_000

Agent = Callable[[rf.Endpoint], Awaitable[None]]


class Workshop(OneTask):
    """Tools with state, with an image, and tools that fail in every way."""

    def setup(self, state) -> None:
        state.total = 0

    @rf.tool
    def add(self, amount: int, state) -> int:
        """Add to the total and return it.

        Args:
            amount: What to add.
        """
        state.total += amount
        return state.total

    @rf.tool
    def look(self) -> list[Any]:
        """Look at the picture."""
        return ["a picture", IMAGE]

    @rf.tool
    def fail(self) -> None:
        """Fail."""
        raise ValueError("as asked")

    @rf.tool
    def read_log(self) -> str:
        """Return a text that begins like an error."""
        return "error: disk full"

    @rf.tool
    async def hang(self) -> None:
        """Never return."""
        await asyncio.Event().wait()

    @rf.tool
    def dump(self) -> str:
        """Return ten megabytes."""
        return "x" * TEN_MB

    @rf.tool
    def lose_sandbox(self) -> None:
        """Fail as a system does."""
        raise SandboxError("the machine is gone")

    @rf.reward
    def total(self, state) -> float:
        return float(state.total)


class HttpAgent(rf.Harness):
    """Runs a coroutine of the test as the agent."""

    requires_endpoint = True
    agent: Agent

    async def run(self, context, session, tools, user, stop_hooks) -> str:
        await self.agent(context.endpoint)
        return "done"


async def run_agent(agent: Agent, taskset=Workshop, **harness: Any) -> Trace:
    """Run one attempt whose agent is a coroutine, and return its trace."""
    name = f"HttpAgent_{id(agent)}"
    globals()[name] = type(name, (HttpAgent,), {"agent": staticmethod(agent)})
    async with Gateway() as gateway:
        env = load_env(taskset, harness={"id": f"{__name__}:{name}", **harness})
        return await run_one(env, [], gateway=gateway)


@contextlib.asynccontextmanager
async def connect(endpoint: rf.Endpoint, mode: str = "auto") -> AsyncGenerator[mcp.Client]:
    """Open a client of MCP's SDK."""
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    http = httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False)
    async with http, mcp.Client(streamable_http_client(endpoint.mcp_url, http_client=http), mode=mode) as client:
        yield client


async def post(endpoint: rf.Endpoint, body: dict[str, Any], timeout: float = 30, **headers: str) -> httpx2.Response:
    """Send one JSON-RPC message, as a client does that knows only HTTP."""
    headers = {
        "authorization": f"Bearer {endpoint.api_key}",
        "accept": "application/json, text/event-stream",
        "mcp-session-id": "test",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    async with httpx2.AsyncClient(timeout=timeout, trust_env=False) as http:
        return await http.post(endpoint.mcp_url, json={"jsonrpc": "2.0", **body}, headers=headers)


def make_call(id: int | str, tool: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


def get_text(result: Any) -> str:
    return "".join(block.text for block in result.content if block.type == "text")


# -- tools of every kind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_of_the_sdk_lists_and_calls_tools_with_state(mode):
    async def agent(endpoint):
        async with connect(endpoint, mode) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools][:2] == ["add", "look"]
            assert tools[0].description == "Add to the total and return it."
            amount = {"type": "integer", "description": "What to add."}
            assert tools[0].input_schema["properties"] == {"amount": amount}  # the state is not shown
            assert get_text(await client.call_tool("add", {"amount": 2})) == "2"
            assert get_text(await client.call_tool("add", {"amount": 3})) == "5"

    trace = await run_agent(agent)
    assert not trace.errors
    assert trace.reward == 5.0


async def test_a_tool_may_return_an_image():
    async def agent(endpoint):
        async with connect(endpoint) as client:
            text, image = (await client.call_tool("look")).content
            assert text.text == "a picture"
            assert (image.mime_type, base64.b64decode(image.data)) == (IMAGE.mime, IMAGE.data)

    trace = await run_agent(agent)
    assert not trace.errors
    assert [media.hash for media in trace.graph.media] == [IMAGE.hash]


@pytest.mark.process
async def test_tools_of_mcp_servers_that_the_config_names_are_served_too():
    async def agent(endpoint):
        async with connect(endpoint) as client:
            assert "shout" in [tool.name for tool in (await client.list_tools()).tools]
            assert get_text(await client.call_tool("shout", {"text": "hi"})) == "HI"

    trace = await run_agent(agent, mcp={"sandbox": {"command": [sys.executable, "-S", mcp_server.__file__]}})
    assert not trace.errors


async def test_calls_are_recorded_in_the_trace():
    async def agent(endpoint):
        async with connect(endpoint) as client:
            await client.call_tool("add", {"amount": 2})
            await client.call_tool("fail")
            assert not (await client.call_tool("read_log")).is_error

    added, failed, read = (await run_agent(agent)).info["tool_calls"]
    assert (added["tool"], added["arguments"], added["result"], added["is_error"]) == (
        "add",
        '{"amount":2}',
        "2",
        False,
    )
    assert (failed["tool"], failed["result"], failed["is_error"]) == ("fail", "error: ValueError: as asked", True)
    assert (read["result"], read["is_error"]) == ("error: disk full", False)
    assert added["start"] <= added["end"] <= failed["start"]
    assert added["node"] == -1  # no reply of the model came before


# -- at most once -----------------------------------------------------------------------------------------------------


async def test_a_retried_id_runs_the_tool_once_and_another_client_runs_it_again():
    async def agent(endpoint):
        first = await post(endpoint, make_call(7, "add", amount=1))
        assert (await post(endpoint, make_call(7, "add", amount=1))).text == first.text
        assert '"text":"2"' in (await post(endpoint, make_call("7", "add", amount=1))).text  # another id
        assert '"text":"3"' in (await post(endpoint, make_call(7, "add", amount=1), mcp_session_id="other")).text
        for total in ("4", "5"):  # each client counts its requests from the same number
            async with connect(endpoint) as client:
                assert get_text(await client.call_tool("add", {"amount": 1})) == total

    trace = await run_agent(agent)
    assert not trace.errors
    assert trace.reward == 5.0
    assert len(trace.info["tool_calls"]) == 5


async def test_a_call_without_a_session_id_is_refused_by_name():
    async def agent(endpoint):
        response = await post(endpoint, make_call(1, "add", amount=1), mcp_session_id="")
        assert response.status_code == 400
        assert "tools/call needs the header mcp-session-id: send `initialize` first" in response.text

    trace = await run_agent(agent)
    assert (trace.reward, trace.errors) == (0.0, [])
    assert [refusal["name"] for refusal in trace.info["refusals"]] == ["RequestInvalid"]


async def test_a_retry_joins_the_call_that_is_still_running():
    class Slow(Workshop):
        @rf.tool
        async def wait(self, state) -> int:
            """Wait for the second request."""
            state.total += 1
            await released.wait()
            return state.total

    released = asyncio.Event()

    async def agent(endpoint):
        with pytest.raises(httpx2.ReadTimeout):
            await post(endpoint, make_call(1, "wait"), timeout=0.3)
        retry = asyncio.create_task(post(endpoint, make_call(1, "wait")))
        await asyncio.sleep(0)
        released.set()
        assert '"text":"1"' in (await retry).text

    trace = await run_agent(agent, Slow)
    assert not trace.errors
    assert trace.reward == 1.0


async def test_the_command_line_client_sends_a_request_again_whose_response_was_cut(monkeypatch, capsys):
    bodies = []

    async def respond(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        result = {"tools": [{"name": "add", "inputSchema": {}}]}
        event = f"data: {json.dumps({'result': result})}\n"
        num_missing = 9 if len(bodies) == 2 else 0
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(event) + num_missing}\r\n\r\n{event}".encode())
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        monkeypatch.setenv("MCP_SERVER_URL", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp")
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert await asyncio.to_thread(tool_client.main, []) == 0
    assert [body["method"] for body in bodies] == ["initialize", "tools/list", "tools/list"]
    assert bodies[1] == bodies[2]
    assert capsys.readouterr().out == "add {}: \n"  # it has no description


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("fail", {}, "error: ValueError: as asked"),
        ("hang", {}, "error: DeadlineExceeded: the tool 'hang' took longer than 0.2 s"),
        ("dump", {}, "error: ContextOverflow: the result of 'dump' has 10000000 bytes"),
        ("add", {"amount": "many"}, "error: add: argument amount"),
        ("ad", {}, "error: there is no tool 'ad'; did you mean add?"),
    ],
)
async def test_a_failing_tool_is_an_error_for_the_agent_and_named_in_the_trace(tool, arguments, message):
    async def agent(endpoint):
        async with connect(endpoint) as client:
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            assert get_text(result).startswith(message)
            assert get_text(await client.call_tool("add", {"amount": 1})) == "1"  # the agent goes on

    trace = await run_agent(agent, tool_timeout=0.2)
    assert not trace.errors
    assert trace.info["tool_calls"][0]["result"].startswith(message)
    assert [call["is_error"] for call in trace.info["tool_calls"]] == [True, False]


async def test_a_server_that_cannot_start_is_named_and_the_next_request_starts_it(monkeypatch):
    async def agent(endpoint):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "mcp.server", None)  # importing it raises ImportError
            response = await post(endpoint, make_call(1, "add", amount=1))
        assert response.status_code == 500
        assert "the MCP server of the gateway cannot start: ModuleNotFoundError" in response.text
        assert '"text":"1"' in (await post(endpoint, make_call(1, "add", amount=1))).text

    assert not (await run_agent(agent)).errors


async def test_a_request_does_not_wait_for_a_server_that_is_closed_while_it_starts():
    session, _ = make_session([])
    server = McpServer(lambda http: session)
    scope = {"type": "http", "method": "POST", "path": "/v1/mcp", "headers": [], "query_string": b""}
    request = asyncio.create_task(server(scope, asyncio.Event().wait, print))
    await asyncio.sleep(0)  # the request starts the server
    await server.close()
    with pytest.raises(PeerRefused, match="the gateway is closing"):
        await asyncio.wait_for(request, 30)


async def test_bodies_and_their_parsing_count_towards_the_quota_of_the_rollout():
    session, _ = make_session([], quota=QuotaSettings(max_bytes=100))
    async with Gateway() as gateway:
        endpoint = gateway.register(session)
        response = await post(endpoint, make_call(1, "add", text="x" * 100))
    assert response.status_code == 400
    assert "the body is larger than 100 bytes" in response.text


async def test_a_failure_of_the_system_ends_the_rollout_as_in_chat():
    async def agent(endpoint):
        async with connect(endpoint) as client:
            with contextlib.suppress(mcp.MCPError):
                await client.call_tool("lose_sandbox")
            await asyncio.Event().wait()

    trace = await run_agent(agent)
    assert error_names(trace) == ["SandboxError"]
    assert trace.errors[0].message == "the machine is gone"


async def test_a_call_after_the_end_is_refused_by_name():
    class Late(Workshop):
        async def finalize(self, endpoint) -> None:
            response = await post(endpoint, make_call(1, "add", amount=1))
            assert "PeerRefused: the agent of this rollout has ended" in response.text

    async def agent(endpoint):
        return None

    trace = await run_agent(agent, Late)
    assert not trace.errors
    assert trace.reward == 0.0
    (refusal,) = trace.info["refusals"]
    assert (refusal["path"], refusal["name"]) == ("/v1/mcp", "PeerRefused")
    assert "'add'" in refusal["message"]


async def test_the_key_of_an_ended_rollout_is_refused():
    endpoints = []

    async def agent(endpoint):
        endpoints.append(endpoint)

    async with Gateway() as gateway:
        await run_one(load_env(Workshop, harness={"id": "chat"}), ["done"], gateway=gateway)
        endpoint = rf.Endpoint(f"{gateway.address}/v1", "no-key", "tiny")
        response = await post(endpoint, make_call(1, "add", amount=1))
    assert response.status_code == 401
    assert "the api key belongs to no running rollout" in response.text


async def test_a_rollout_without_tools_has_an_empty_server():
    async def agent(endpoint):
        async with connect(endpoint) as client:
            assert (await client.list_tools()).tools == []

    assert not (await run_agent(agent, OneTask)).errors


async def test_a_client_that_listens_for_messages_of_the_server_is_told_that_there_are_none():
    async def agent(endpoint):
        headers = {"authorization": f"Bearer {endpoint.api_key}", "accept": "text/event-stream"}
        async with httpx2.AsyncClient(timeout=30, trust_env=False) as http:
            assert (await http.get(endpoint.mcp_url, headers=headers)).status_code == 405

    trace = await run_agent(agent)
    assert not trace.errors
    assert "refusals" not in trace.info
