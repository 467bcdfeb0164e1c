"""An agent program that stores its conversation in a file and continues it when it is run again.

    turn_agent.py [TURN] [--file FILE] [--continue] [PROMPT]

It continues if TURN is above 1, or with `--continue`. Without a prompt it reads the standard input.
"""

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path

flags = argparse.ArgumentParser()
flags.add_argument("--continue", action="store_true", dest="continues")
flags.add_argument("--file", type=Path)
flags.add_argument("words", nargs="*")
options = flags.parse_args()
turn = int(options.words.pop(0)) if options.words and options.words[0].isdigit() else None
prompt = options.file.read_text() if options.file else options.words[0] if options.words else sys.stdin.read()
history = Path("history.json")
continues = options.continues or (turn or 0) > 1
messages = json.loads(history.read_text()) if continues else []
messages.append({"role": "user", "content": prompt})
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request, timeout=20) as response:
    reply = json.load(response)["choices"][0]["message"]["content"]
history.write_text(json.dumps([*messages, {"role": "assistant", "content": reply}]))
print(f"turn {turn}: {reply}")
