"""An agent that knows nothing of Ramify: it reads a task, asks a model with the OpenAI SDK, and prints the answer."""

import os
import sys

import openai


def main() -> None:
    task = sys.stdin.read()
    client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    completion = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=[{"role": "user", "content": task}],
    )
    print(completion.choices[0].message.content)


if __name__ == "__main__":
    main()
