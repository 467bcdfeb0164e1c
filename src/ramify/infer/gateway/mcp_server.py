"""The MCP server of the gateway: agents list and call the tools of their rollout over streamable HTTP.

MCP's SDK parses and answers the messages. Each request is complete in itself: the SDK keeps no session, and the API key
selects the rollout. A client gets a session id all the same, because clients count their requests from the same number:
session id and request id together name a call, which is run once however often it is sent. A call without a session id
is refused. Protocol versions without a handshake have no session ids, so such a client gets the list of supported
versions.

The library is the extra `mcp`. Its import takes a second, so the server starts with the first request.
"""

import asyncio
import base64
import contextlib
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from ramify.core.async_calls import cancel_all, fail_after
from ramify.core.errors import PeerRefused, RamifyError, RequestInvalid, UnknownFailure
from ramify.infer.dialects.http_format import decode_body, get_http_status
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX
from ramify.infer.gateway.http_handlers import SessionLookup, read_body
from ramify.infer.gateway.served_tools import ERROR_PREFIX, ServedTools
from ramify.infer.gateway.session import RolloutSession
from ramify.model.render.tokenizer import OFFLOAD_MIN_CHARS
from ramify.trace import MediaPart, ToolCall

if TYPE_CHECKING:
    import mcp.types
    from mcp.server import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

SESSION_KEY = "ramify.session"  # of a request's scope
SESSION_HEADER, VERSION_HEADER = "mcp-session-id", "mcp-protocol-version"
START_TIMEOUT = 60.0  # seconds to import the library


class McpRequest(msgspec.Struct):
    """What the server itself reads of a request; the SDK parses the rest."""

    method: str = ""


class McpServer:
    """Answers the MCP requests of all rollouts of a gateway, as an ASGI application, until `close`."""

    def __init__(self, get_session: SessionLookup) -> None:
        self._get_session = get_session
        self._manager: asyncio.Future[StreamableHTTPSessionManager] | None = None
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop the server."""
        if self._task is not None:
            await cancel_all([self._task])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A refused request is recorded in the trace of its rollout."""
        http = HttpRequest(scope, receive)
        session = self._get_session(http)
        if http.method != "POST":
            # Clients ask whether the server sends messages of its own, or end a session. It is not an error.
            await Response(status_code=405, headers={"allow": "POST"})(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"{REQUEST_TASK_PREFIX}{session.trace.id}")  # so that a hang report names the rollout
        try:
            async with contextlib.AsyncExitStack() as held:
                held.enter_context(session.quota.open_request())
                manager = await self._get_manager()
                if (refusal := check_version(http.headers)) is not None:
                    await refusal(scope, receive, send)
                    return
                body = await _read_request(http, session, held)
                scope[SESSION_KEY] = session
                await manager.handle_request(scope, _replay(body, receive), _add_session_id(http.headers, send))
        except RamifyError as error:
            session.record_refusal(http.url.path, get_http_status(error), error.name, error.message)
            raise
        except ClientDisconnect:
            return

    async def _get_manager(self) -> "StreamableHTTPSessionManager":
        """Return the SDK's manager; start it if it does not run."""
        if self._manager is None or self._task is None or self._task.done():
            self._manager = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(_run_manager(self._manager), name="mcp server")
        manager = self._manager
        async with fail_after(START_TIMEOUT, "the start of the MCP server"):
            await asyncio.wait({manager, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not manager.done():
            raise PeerRefused("the gateway is closing, so its MCP server does not start")
        return manager.result()


async def _run_manager(started: "asyncio.Future[StreamableHTTPSessionManager]") -> None:
    """Hold the SDK's manager open until this task is cancelled. The SDK needs a task of its own for it."""
    try:
        manager = await asyncio.to_thread(_build_manager)
        async with manager.run():
            started.set_result(manager)
            await asyncio.Event().wait()
    except Exception as error:
        if started.done():
            raise
        started.set_exception(UnknownFailure(f"the MCP server of the gateway cannot start: {error!r}"))
        started.exception()  # all requests may have left, and asyncio warns about an exception that nobody retrieves


def _build_manager() -> "StreamableHTTPSessionManager":
    from mcp.server import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    server = Server("taskset", on_list_tools=_list_tools, on_call_tool=_call_tool)
    return StreamableHTTPSessionManager(server, stateless=True)


def check_version(headers: Headers) -> JSONResponse | None:
    """Return the response to a protocol version without a handshake, or None."""
    from mcp.types import UNSUPPORTED_PROTOCOL_VERSION
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

    version = headers.get(VERSION_HEADER)
    if version is None or version in HANDSHAKE_PROTOCOL_VERSIONS:
        return None
    data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
    error = {"code": UNSUPPORTED_PROTOCOL_VERSION, "message": "the server needs a handshake", "data": data}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, 400)


async def _read_request(http: HttpRequest, session: RolloutSession, held: contextlib.AsyncExitStack) -> bytearray:
    """Return the body of a request, within the quota. Raises RequestInvalid for a tool call without a session id."""
    async with fail_after(session.call_timeout, "reading an MCP request"):
        body = await read_body(http, session, held)
        request = await session.quota.run(len(body) >= OFFLOAD_MIN_CHARS, 0, decode_body, body, McpRequest)
    if request.method == "tools/call" and not http.headers.get(SESSION_HEADER):
        raise RequestInvalid(
            f"tools/call needs the header {SESSION_HEADER}: send `initialize` first, and then the session id of its"
            " response with each request"
        )
    return body


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Return a `receive` whose first message is a body that has been read."""
    messages: list[AsgiMessage] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def receive_body() -> AsgiMessage:
        return messages.pop() if messages else await receive()

    return receive_body


def _add_session_id(headers: Headers, send: Send) -> Send:
    """Return a `send` that gives a client without a session id one."""
    if SESSION_HEADER in headers:
        return send

    async def send_with_session_id(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[SESSION_HEADER] = uuid.uuid4().hex
        await send(message)

    return send_with_session_id


def _get_tools(context: "ServerRequestContext[Any, Any]") -> tuple[RolloutSession, ServedTools | None]:
    assert context.request is not None
    session: RolloutSession = context.request.scope[SESSION_KEY]
    return session, session.tools


async def _list_tools(
    context: "ServerRequestContext[Any, Any]", params: "mcp.types.PaginatedRequestParams | None"
) -> "mcp.types.ListToolsResult":
    from mcp.types import ListToolsResult, Tool

    _, tools = _get_tools(context)
    functions: list[dict[str, Any]] = [] if tools is None else [schema["function"] for schema in tools.schemas]
    return ListToolsResult(
        tools=[
            Tool(
                name=function["name"],
                description=function.get("description"),
                input_schema={"type": "object", **function["parameters"]},
            )
            for function in functions
        ]
    )


async def _call_tool(
    context: "ServerRequestContext[Any, Any]", params: "mcp.types.CallToolRequestParams"
) -> "mcp.types.CallToolResult":
    from mcp.types import CallToolResult, ImageContent, TextContent

    session, tools = _get_tools(context)
    assert context.request is not None
    client = context.request.headers[SESSION_HEADER]
    call = ToolCall(repr(context.request_id), params.name, msgspec.json.encode(params.arguments or {}).decode())
    try:
        if tools is None:
            raise PeerRefused(f"this rollout has no tools, so {call.name!r} cannot be called")
        message, is_error = await tools.call(client, call)
    except RamifyError as error:
        if isinstance(error, PeerRefused):
            session.record_refusal(context.request.url.path, get_http_status(error), error.name, error.message)
        text = f"{ERROR_PREFIX}{error.name}: {error.message}"
        return CallToolResult(content=[TextContent(text=text)], is_error=True)
    content: list[TextContent | ImageContent] = []
    for part in [message.content] if isinstance(message.content, str) else message.content:
        if isinstance(part, MediaPart):
            media = tools.find_media(part)
            content.append(ImageContent(data=base64.b64encode(media.data).decode(), mime_type=media.mime))
        else:
            content.append(TextContent(text=part if isinstance(part, str) else part.text))
    return CallToolResult(content=list(content), is_error=is_error)
