"""A command-line client of a rollout's tools, for agent programs that do not support MCP.

    python3 tools.py                        list the tools
    python3 tools.py NAME '{"key": 1}'      call a tool with arguments as JSON

It is copied into the runtime and needs only the standard library. Images are written to files, whose paths are printed.
A request that got no response is sent again with the same id, so that the tool runs once.
"""

import base64
import http.client
import json
import mimetypes
import os
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

TIMEOUT = 3600  # seconds
NUM_ATTEMPTS = 3
VERSION = "2025-06-18"  # of the protocol


def main(arguments: list[str]) -> int:
    """List the tools or call one; return 1 if the call failed."""
    if not arguments:
        for tool in ask("tools/list", {})["tools"]:
            properties = json.dumps(tool["inputSchema"].get("properties", {}))
            print(f"{tool['name']} {properties}: {tool.get('description') or ''}")
        return 0
    try:
        values: Any = json.loads(arguments[1]) if len(arguments) > 1 else {}
    except json.JSONDecodeError as error:
        print(f"error: the arguments are not JSON: {error}")
        return 1
    result = ask("tools/call", {"name": arguments[0], "arguments": values})
    for index, block in enumerate(result["content"]):
        print(block["text"] if block["type"] == "text" else write_image(block, index))
    return int(result.get("isError", False))


def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Open a session, send a request and return its result. Raises SystemExit if it is refused or gets no response."""
    client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "tools.py", "version": "1"}}
    _, session_id = send("initialize", client, {})
    text, _ = send(method, params, {"Mcp-Session-Id": session_id, "Mcp-Protocol-Version": VERSION})
    return read_result(text)


def send(method: str, params: dict[str, Any], headers: dict[str, str]) -> tuple[str, str]:
    """Send a request and return its response and the session id in it."""
    body = json.dumps({"jsonrpc": "2.0", "id": uuid.uuid4().hex, "method": method, "params": params}).encode()
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **headers,
    }
    request = urllib.request.Request(os.environ["MCP_SERVER_URL"], body, headers)
    problem: Exception | None = None
    for _ in range(NUM_ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return response.read().decode(), response.headers.get("Mcp-Session-Id", "")
        except urllib.error.HTTPError as error:
            raise SystemExit(f"error: {error.read().decode()}") from None
        except (OSError, http.client.HTTPException) as error:
            problem = error
    raise SystemExit(f"error: the tools cannot be reached: {problem}")


def read_result(text: str) -> dict[str, Any]:
    """Return the result in the events of a response."""
    lines = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")]
    response = json.loads(lines[-1]) if lines else {"error": {"message": f"no response: {text:.200}"}}
    if "error" in response:
        raise SystemExit(f"error: {response['error']['message']}")
    return response["result"]


def write_image(block: dict[str, Any], index: int) -> str:
    """Write an image to a new file of the work directory and return its path."""
    path = f"image-{uuid.uuid4().hex[:8]}-{index}{mimetypes.guess_extension(block['mimeType']) or ''}"
    Path(path).write_bytes(base64.b64decode(block["data"]))
    return f"[image written to {path}]"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
