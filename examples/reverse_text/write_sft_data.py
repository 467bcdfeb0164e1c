"""Write gold conversations of reverse-text for `ramify sft`: python write_sft_data.py FILE."""

import json
import sys
from pathlib import Path

from ramify.env.tasksets.reverse_text import ReverseText, ReverseTextConfig

taskset = ReverseText(ReverseTextConfig(id="reverse-text", num_tasks=40_000))
with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
    for task in taskset.load():
        contents = {"system": task.system, "user": task.prompt, "assistant": taskset.gold(task)}
        messages = [{"role": role, "content": text} for role, text in contents.items()]
        file.write(json.dumps({"messages": messages}) + "\n")
