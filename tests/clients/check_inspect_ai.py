"""inspect_ai against a server: an evaluation with its OpenAI provider, and a conversation that is too long.

Run by an interpreter that has inspect_ai and openai: `python check_inspect_ai.py http://127.0.0.1:8000`.
"""

import asyncio
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate

WORDS = ["abc", "tree", "lamp"]


def main(url: str) -> None:
    model = get_model("openai-api/ramify/tiny", base_url=f"{url}/v1", api_key="none")
    samples = [Sample(input=f"Reverse: {word}", target=word[::-1]) for word in WORDS]
    task = Task(dataset=samples, solver=generate(), scorer=match(), config=GenerateConfig(max_tokens=16, temperature=0))
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(task, model=model, log_dir=folder, display="none", max_retries=0)
        assert log.status == "success", log.error and log.error.message
        assert log.samples is not None and log.results is not None
        assert len(log.samples) == len(WORDS) and all(sample.output.completion for sample in log.samples)
    (usage,) = log.stats.model_usage.values()
    assert usage.output_tokens > 0
    accuracy = log.results.scores[0].metrics["accuracy"].value
    print(f"evaluation: {len(WORDS)} samples, accuracy {accuracy:.2f}, {usage.output_tokens} tokens sampled")

    output = asyncio.run(model.generate("abc " * 20_000, config=GenerateConfig(max_tokens=4, max_retries=0)))
    assert output.stop_reason == "model_length", output
    print(f"too long a prompt: stop_reason {output.stop_reason}")


if __name__ == "__main__":
    main(sys.argv[1])
