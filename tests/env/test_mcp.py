"""Tools of real MCP servers: one is a child process, the other listens on a port."""

import base64
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import uvicorn

from ramify.core.config import parse_section
from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env import McpServerConfig, ToolSet
from ramify.env.mcp import extend_tools
from ramify.trace import MediaPart, ToolCall
from tests.support import mcp_server
from tests.support.images import make_media
from tests.support.rollout_context import make_context

pytestmark = pytest.mark.process

SERVER = textwrap.dedent('''
    import base64, os, sys
    from mcp.server.mcpserver import Image, MCPServer

    server = MCPServer("test")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool()
    def fail() -> str:
        """Always fails."""
        raise ValueError("as always")

    @server.tool()
    def look() -> Image:
        """Show an image."""
        return Image(data=base64.b64decode("PIXEL"), format="png")

    @server.tool()
    def process() -> str:
        return str(os.getpid())

    if __name__ == "__main__":
        server.run()
''').replace("PIXEL", base64.b64encode(make_media(4, 4).data).decode())


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def url():
    namespace: dict = {"__name__": "served"}
    exec(SERVER, namespace)
    app = namespace["server"].streamable_http_app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join(20)


async def call_all_tools(server: McpServerConfig) -> int:
    """Call all tools of a server; return the id of its process."""
    context = make_context()
    async with extend_tools(ToolSet(), {"test": server}, None) as tools:
        assert [tool.name for tool in tools.tools] == ["add", "fail", "look", "process"]
        schema = tools.schemas[0]["function"]
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["required"] == ["a", "b"]
        answer = await tools.call(ToolCall("1", "add", '{"a": 2, "b": 3}'), context)
        assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "5", "1")
        answer = await tools.call(ToolCall("2", "fail", "{}"), context)
        assert answer.text.startswith("error: ")
        answer = await tools.call(ToolCall("3", "add", '{"a": "x"}'), context)
        assert answer.text.startswith("error: ")
        answer = await tools.call(ToolCall("4", "look", ""), context)
        assert answer.content == (MediaPart(context.trace.graph.media[0].hash),)
        assert context.trace.graph.media[0] == make_media(4, 4)
        return int((await tools.call(ToolCall("5", "process", "{}"), context)).text)


async def test_command_server_exits_when_it_is_closed(script):
    assert not psutil.pid_exists(await call_all_tools(McpServerConfig(command=[sys.executable, str(script)])))


async def test_url_server(url):
    await call_all_tools(McpServerConfig(url=url, headers={"X-Key": "1"}))


async def test_exit_of_a_server_raises_a_sandbox_error():
    config = McpServerConfig(command=[sys.executable, "-S", mcp_server.__file__])
    async with extend_tools(ToolSet(), {"one": config}, None) as tools:
        with pytest.raises(SandboxError, match="'one' closed the connection"):
            await tools.call(ToolCall("1", "shout", '{"text": 1}'), make_context())


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServerConfig(command=["no-such-program"]), "'x' cannot be opened: .*no-such-program"),
        (McpServerConfig(command=[sys.executable, "-c", "import sys; sys.exit('no licence')"]), "it wrote: no licence"),
        (McpServerConfig(url="http://127.0.0.1:9/mcp"), "'x' cannot be opened"),
        (McpServerConfig(command=["sh", "-c", "cat > /dev/null"], timeout=0.3), r"did not open within 0\.3 s"),
    ],
)
async def test_server_that_cannot_be_opened_raises_its_name(server, message):
    with pytest.raises(SandboxError, match=message):
        async with extend_tools(ToolSet(), {"x": server}, None):
            pass


@pytest.mark.parametrize(
    "table", [{}, {"command": ["a"], "url": "u"}, {"url": "u", "env": {"A": "1"}}, {"command": ["a"], "cmd": "b"}]
)
def test_server_config_is_validated(table):
    with pytest.raises(ConfigInvalid, match="mcp"):
        parse_section(McpServerConfig, table, key="mcp.x")


def test_mcp_library_is_not_imported_before_a_server_is_opened():
    script = "import ramify.env as env, sys; [getattr(env, name) for name in env.__all__]; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
