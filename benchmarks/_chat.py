"""A chat model without weights and a long conversation, for the comparison of renderers.

The tokenizer is a byte-level BPE trained on the pages of docs/, the template is the tests' template for Qwen2.5.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TOKENS += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TURNS = 160
WORDS = 40  # in each message


def corpus() -> str:
    return "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md")))


def template() -> str:
    return (ROOT / "tests" / "support" / "templates" / "qwen2.5.jinja").read_text("utf-8")


def tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator([corpus()], trainer)
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in TOKENS])
    return built


def save(directory: Path) -> None:
    """Save the model as a directory."""
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(template())


def conversation(turns: int = TURNS) -> list[dict[str, str]]:
    """Return a system prompt, then alternating questions and answers; the last message is a question."""
    words = [word for word in corpus().split() if word.isalnum()]  # the pages also show control tokens
    messages = [{"role": "system", "content": "Answer the question."}]
    for number in range(2 * turns - 1):
        start = number * WORDS % (len(words) - WORDS)
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": " ".join(words[start : start + WORDS])})
    return messages
