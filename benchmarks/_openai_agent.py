"""An agent with the OpenAI SDK: it reads a task, asks the model, and asks again until the answer is marked."""

import os
import sys
from typing import Any

from openai import OpenAI

SYSTEM = "You are a careful assistant. Answer inside <answer> tags and think of the units."
MAX_TURNS = 3


def main() -> int:
    client = OpenAI(timeout=600.0, max_retries=0)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        reply = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        if "<answer>" in reply:
            print(reply.split("<answer>")[1].split("</answer>")[0])
            return 0
        messages.append({"role": "user", "content": "Please put the answer inside <answer> tags."})
    print("no answer", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
