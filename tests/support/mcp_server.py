"""An MCP server on standard input and output whose tool `shout` returns a text in capitals, and crashes without a text.

A server that uses the MCP library takes a second of processor time to start.
"""

import json
import sys

INFO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "shouting", "version": "1"},
}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def answer(request: dict) -> dict:
    match request["method"]:
        case "initialize":
            return {"result": INFO}
        case "tools/list":
            return {"result": {"tools": [{"name": "shout", "inputSchema": SCHEMA}]}}
        case "tools/call":
            text = request["params"]["arguments"]["text"].upper()
            return {"result": {"content": [{"type": "text", "text": text}]}}
        case _:
            return {"error": {"code": -32601, "message": "unknown method"}}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:  # a notification has none
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer(request)}), flush=True)
