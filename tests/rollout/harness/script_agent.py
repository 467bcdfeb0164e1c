"""An agent program that knows only the standard library: it asks the policy once and writes the reply to a file.

The first argument is the API ("openai" or "anthropic"), the last one the prompt, `@FILE` for a file, or `-` for the
standard input.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

api, prompt = sys.argv[1], sys.argv[-1]
if prompt == "-":
    prompt = sys.stdin.read()
elif prompt.startswith("@"):
    prompt = Path(prompt[1:]).read_text()
base_url, key, model = (os.environ[f"{api.upper()}_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
path = "/chat/completions" if api == "openai" else "/v1/messages"
body = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": prompt}]}
request = urllib.request.Request(
    base_url + path, json.dumps(body).encode(), {"authorization": f"Bearer {key}", "content-type": "application/json"}
)
with urllib.request.urlopen(request, timeout=20) as response:
    answer = json.load(response)
text = answer["choices"][0]["message"]["content"] if api == "openai" else answer["content"][0]["text"]
Path("answer.txt").write_text(text)
print("the model said", text)
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
