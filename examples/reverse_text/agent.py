"""An agent that knows nothing of Ramify: it reads a task, asks a model over HTTP, and prints the answer.

It needs only the standard library. A client such as the OpenAI SDK works too, since it reads the same variables.
"""

import json
import os
import sys
import urllib.request

TIMEOUT = 600.0  # seconds for a reply


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's reply to a conversation."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    print(ask([{"role": "user", "content": sys.stdin.read()}]))
