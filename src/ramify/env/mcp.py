"""Tools of MCP servers. A config names a command to start (stdio) or a URL (streamable HTTP).

Servers are open while the context manager `extend_tools` is active. The MCP library ties a connection to the
asyncio task that opened it, while tools are called from other tasks, so each server gets its own task, which opens the
connection, waits and closes it. The library is the extra `mcp` and is imported only if a config names a server.
"""

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import Field, model_validator

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env.context import RolloutContext
from ramify.env.tools import ErrorText, Tool, ToolContent, ToolSet, ToolWithTimeout, to_content
from ramify.infer.dialects.media import media_from_base64
from ramify.trace import Media

if TYPE_CHECKING:
    import mcp

CLOSE_TIMEOUT = 10.0  # seconds for a server to exit by itself
LOG_EXCERPT_CHARS = 500  # of the output of a server that failed to start


class McpServerConfig(Config):
    """How to reach an MCP server: exactly one of `command` and `url`."""

    command: list[str] = []
    """A program and its arguments; it is used over its standard input and output."""
    url: str | None = None
    """The address of a server that speaks streamable HTTP."""
    env: dict[str, str] = {}
    """Environment variables for `command`, added to the safe defaults of the MCP library."""
    cwd: str | None = None
    """The working directory of `command`."""
    headers: dict[str, str] = {}
    """HTTP headers sent to `url` with every request."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds for a call, and for opening the server."""

    @model_validator(mode="after")
    def _requires_exactly_one_of_command_and_url(self) -> "McpServerConfig":
        if bool(self.command) == (self.url is not None):
            raise ValueError("expected either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers require url; use env for a command")
        if self.url is not None and (self.env or self.cwd):
            raise ValueError("env and cwd require command; use headers for a url")
        return self


def check_mcp_library() -> None:
    """Raise ConfigInvalid if the MCP library is not installed."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigInvalid("MCP servers, and tools for programs, need the extra `mcp`: pip install 'ramify[mcp]'")


class McpTool(Tool):
    """A tool of an MCP server."""

    def __init__(self, connection: "_McpConnection", tool: "mcp.Tool") -> None:
        super().__init__(tool.name, tool.description or "", tool.input_schema)
        self._connection = connection

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Call the tool on its server and return the content of the result."""
        result = await self._connection.call(self.name, arguments)
        parts = [_to_content_part(block) for block in result.content]
        texts = [part for part in parts if isinstance(part, str)]
        if result.is_error:
            return ErrorText("\n".join(texts))
        return "\n".join(texts) if len(texts) == len(parts) else to_content(parts, context)


@contextlib.asynccontextmanager
async def extend_tools(
    tools: ToolSet, servers: Mapping[str, McpServerConfig], timeout: float | None
) -> AsyncGenerator[ToolSet]:
    """Yield the tools and the tools of these servers, with a time limit in seconds on each call if there is one.

    Raises SandboxError if a server cannot be reached.
    """
    if not servers and timeout is None:
        yield tools
        return
    async with contextlib.AsyncExitStack() as stack:
        connections = [_McpConnection(name, config) for name, config in servers.items()]
        for connection in connections:
            stack.push_async_callback(connection.close)
        opened = await asyncio.gather(*(connection.open() for connection in connections))
        all_tools = [*tools.tools, *(tool for server_tools in opened for tool in server_tools)]
        yield ToolSet(all_tools if timeout is None else [ToolWithTimeout(tool, timeout) for tool in all_tools])


class _McpConnection:
    """The connection to one server, held open by its own asyncio task."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self._closing = asyncio.Event()
        self._tools_ready: asyncio.Future[list[Tool]] = asyncio.get_running_loop().create_future()
        self._client: mcp.Client | None = None
        self._connection_task: asyncio.Task[None] | None = None

    async def open(self) -> list[Tool]:
        self._connection_task = asyncio.create_task(self._run_connection(), name=f"mcp {self._name}")
        await asyncio.wait(
            [self._connection_task, self._tools_ready], timeout=self._config.timeout, return_when="FIRST_COMPLETED"
        )
        if self._tools_ready.done():
            return self._tools_ready.result()
        if self._connection_task.done():
            await self._connection_task
        raise SandboxError(f"MCP server {self._name!r} did not open within {self._config.timeout:g} s")

    async def close(self) -> None:
        self._closing.set()
        if self._connection_task is None:
            return
        if not self._tools_ready.done():
            self._connection_task.cancel()
        await asyncio.wait([self._connection_task], timeout=CLOSE_TIMEOUT)
        self._connection_task.cancel()

    async def call(self, name: str, arguments: dict[str, Any]) -> "mcp.types.CallToolResult":
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        assert self._client is not None  # its tools exist only after `open`
        try:
            return await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise
            raise SandboxError(f"MCP server {self._name!r} closed the connection: {error.message}") from error

    async def _run_connection(self) -> None:
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with self._connect(log) as client:
                    self._client = client
                    self._tools_ready.set_result([McpTool(self, tool) for tool in await _list_all_tools(client)])
                    await self._closing.wait()
            except Exception as error:
                if self._tools_ready.done():
                    return  # it was open; a later failure is raised by the next call
                log.seek(0)
                log_tail = log.read()[-LOG_EXCERPT_CHARS:].strip()
                reason = f"{type(error).__name__}: {error}" + (f"; it wrote: {log_tail}" if log_tail else "")
                raise SandboxError(f"MCP server {self._name!r} cannot be opened: {reason}") from error

    @contextlib.asynccontextmanager
    async def _connect(self, log: TextIO) -> "AsyncGenerator[mcp.Client]":
        check_mcp_library()
        import httpx2
        import mcp
        from mcp.client.streamable_http import streamable_http_client

        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            if config.url is not None:
                http = httpx2.AsyncClient(headers=config.headers, timeout=config.timeout, trust_env=False)
                await stack.enter_async_context(http)
                transport = streamable_http_client(config.url, http_client=http)
            else:
                program, *arguments = config.command
                server = mcp.StdioServerParameters(command=program, args=arguments, env=config.env, cwd=config.cwd)
                transport = mcp.stdio_client(server, errlog=log)
            yield await stack.enter_async_context(mcp.Client(transport, read_timeout_seconds=config.timeout))


async def _list_all_tools(client: "mcp.Client") -> list["mcp.Tool"]:
    """Return all tools of a server, from all pages."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _to_content_part(block: Any) -> str | Media:
    """Convert a content block of a result: text and images as they are, other blocks to JSON text."""
    match block.type:
        case "text":
            return block.text
        case "image":
            return media_from_base64(block.data, block.mime_type)
        case _:
            return block.model_dump_json(exclude_none=True)
