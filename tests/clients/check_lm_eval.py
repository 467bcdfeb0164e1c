"""lm-eval against a server: a multiple-choice task of local files, scored with `echo` and `logprobs`.

Every score is compared with one computed here from the endpoint for token ids. Run by an interpreter that has lm-eval:
`python check_lm_eval.py http://127.0.0.1:8000`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

WORDS = ["abc", "tree", "lamp", "stone", "river", "cloud"]
ROWS = [{"question": f"Copy: {w}", "choices": [w[::-1], w, w + w, "x"], "answer": i % 4} for i, w in enumerate(WORDS)]
NAME = "local_choice"


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder
        results = evaluate(url, Path(folder))
    samples = sorted(results["samples"][NAME], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ROWS)
    right = 0
    for row, sample in zip(ROWS, samples, strict=True):
        expected = score_choices(url, row)
        measured = [float(score) for score, _ in sample["filtered_resps"]]
        assert all(abs(a - b) < 1e-3 for a, b in zip(expected, measured, strict=True)), (expected, measured)
        right += expected.index(max(expected)) == row["answer"]
    accuracy = results["results"][NAME]["acc,none"]
    assert accuracy == right / len(ROWS), (accuracy, right)
    print(f"multiple choice: acc {accuracy:.3f} of {len(ROWS)} questions; every score comes from the token ids")


def evaluate(url: str, folder: Path) -> dict[str, Any]:
    """Return the results of lm-eval."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": "tiny", "base_url": f"{url}/v1/completions", "max_retries": 1, "batch_size": 4},
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )


def score_choices(url: str, row: dict[str, Any]) -> list[float]:
    """Return the logprob of each choice after the question, from the endpoint for token ids."""
    context = tokens(url, row["question"])
    scores: list[float] = []
    for choice in row["choices"]:
        ids = tokens(url, f"{row['question']} {choice}")
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
        logprobs = post(f"{url}/inference/v1/generate", body)["prompt_logprobs"]
        choice_logprobs = zip(ids[len(context) :], logprobs[len(context) :], strict=True)
        scores.append(sum(entry[str(id)]["logprob"] for id, entry in choice_logprobs))
    return scores


def tokens(url: str, text: str) -> list[int]:
    return post(f"{url}/tokenize", {"prompt": text})["tokens"]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(sys.argv[1])
