"""An agent that knows nothing of Ramify: it offers a model the tools of an MCP server, and runs the model's calls."""

import json
import os
import sys
import urllib.request
from typing import Any

TIMEOUT = 600.0  # seconds for a response
MAX_TURNS = 4
CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "agent", "version": "1"}}

HEADERS = {
    "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}


def post(url: str, body: dict[str, Any]) -> str:
    """Return the response to a JSON body. The session id that the MCP server gives is sent with all later requests."""
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if session_id := response.headers.get("mcp-session-id"):
            HEADERS["mcp-session-id"] = session_id
        return response.read().decode()


def ask_mcp(id: int | str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request to the MCP server, from the last event of its response."""
    text = post(os.environ["MCP_SERVER_URL"], {"jsonrpc": "2.0", "id": id, "method": method, "params": params})
    events = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")]
    return json.loads(events[-1])["result"]


def main(prompt: str) -> None:
    """Work on a task until the model replies without a call."""
    try:
        ask_mcp("initialize", "initialize", CLIENT)
        tools = ask_mcp("list", "tools/list", {})["tools"]
    except OSError as error:
        print("no tools:", error)
        tools = []
    functions = [
        {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
        for tool in tools
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    body |= {"tools": [{"type": "function", "function": function} for function in functions]} if tools else {}
    num_calls = 0
    for _ in range(MAX_TURNS):
        reply = json.loads(post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body))["choices"][0]["message"]
        messages.append(reply)
        for call in reply.get("tool_calls") or []:
            num_calls += 1
            params = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            text = "".join(part.get("text", "") for part in ask_mcp(num_calls, "tools/call", params)["content"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if not reply.get("tool_calls"):
            break


main(sys.stdin.read())
