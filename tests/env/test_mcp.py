"""Tools of real MCP servers: one is a process that we start, the other listens on a port."""

import subprocess
import sys
import textwrap

import psutil
import pytest

from ramify.config import parse_section
from ramify.env import McpServerConfig, ToolSet, open_mcp_servers
from ramify.errors import ConfigInvalid, SandboxError
from ramify.trace import MediaPart, ToolCall
from tests.env.context import context, run
from tests.env.serving import serving

SERVER = textwrap.dedent('''
    import os, sys
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
        return Image(data=b"png", format="png")

    @server.tool()
    def die() -> str:
        """End the server."""
        os._exit(3)

    @server.tool()
    def process() -> str:
        return str(os.getpid())

    if __name__ == "__main__":
        server.run()
''')


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def url(script):
    space: dict = {"__name__": "served"}
    exec(SERVER, space)
    with serving(space["server"].streamable_http_app()) as address:
        yield f"{address}/mcp"


async def use(server: McpServerConfig) -> int:
    """Call its tools; returns the process they ran in."""
    here = context()
    async with open_mcp_servers({"test": server}) as found:
        tools = ToolSet.wrap(found)
        assert [tool.name for tool in tools.tools] == ["add", "fail", "look", "die", "process"]
        schema = tools.schemas[0]["function"]
        assert schema["description"] == "Add two numbers."
        assert schema["parameters"]["required"] == ["a", "b"]
        answer = await tools.call(ToolCall("1", "add", '{"a": 2, "b": 3}'), here)
        assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "5", "1")
        answer = await tools.call(ToolCall("2", "fail", "{}"), here)
        assert answer.text.startswith("error: ")
        answer = await tools.call(ToolCall("3", "add", '{"a": "x"}'), here)
        assert answer.text.startswith("error: ")
        answer = await tools.call(ToolCall("4", "look", ""), here)
        assert answer.content == (MediaPart(here.trace.graph.media[0].hash),)
        assert here.trace.graph.media[0].data == b"png"
        return int((await tools.call(ToolCall("5", "process", "{}"), here)).text)


def test_a_server_that_is_a_command_ends_with_whoever_opened_it(script):
    assert not psutil.pid_exists(run(use(McpServerConfig(command=[sys.executable, str(script)]))))


def test_a_server_that_is_a_url(url):
    run(use(McpServerConfig(url=url, headers={"X-Key": "1"})))


def test_the_death_of_a_server_is_not_the_models_fault(script):
    async def test():
        config = McpServerConfig(command=[sys.executable, str(script)])
        async with open_mcp_servers({"one": config}) as found:
            with pytest.raises(SandboxError, match="'one' closed the connection"):
                await ToolSet.wrap(found).call(ToolCall("1", "die", "{}"), context())

    run(test())


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (McpServerConfig(command=["no-such-program"]), "'x' cannot be opened: .*no-such-program"),
        (McpServerConfig(command=[sys.executable, "-c", "import sys; sys.exit('no licence')"]), "it wrote: no licence"),
        (McpServerConfig(url="http://127.0.0.1:9/mcp"), "'x' cannot be opened"),
        (McpServerConfig(command=["sh", "-c", "cat > /dev/null"], timeout=0.3), r"did not open within 0\.3 s"),
    ],
)
def test_a_server_that_cannot_be_opened_is_named(server, said):
    async def test():
        with pytest.raises(SandboxError, match=said):
            async with open_mcp_servers({"x": server}):
                pass

    run(test())


@pytest.mark.parametrize(
    "table", [{}, {"command": ["a"], "url": "u"}, {"url": "u", "env": {"A": "1"}}, {"command": ["a"], "cmd": "b"}]
)
def test_the_config_of_a_server_is_checked(table):
    with pytest.raises(ConfigInvalid, match="mcp"):
        parse_section(McpServerConfig, table, key="mcp.x")


def test_the_library_is_loaded_when_a_server_is_opened_and_not_before():
    script = "import ramify.env as env, sys; [getattr(env, name) for name in env.__all__]; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
