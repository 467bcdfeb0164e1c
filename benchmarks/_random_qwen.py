"""The random models of the GPU benchmarks: shapes of Qwen3 with a smaller vocabulary, in bfloat16.

    _random_qwen.py DIRECTORY [SIZE [VOCABULARY [chat]]]

Their tokenizer has the 256 bytes, two marks of messages and numbered words, so that every sampled id can be decoded.
With `chat`, it also has the marks of tool calls, merges that are trained on the docs, and the chat template of Qwen3.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCAB = 39_000
SIZES = {  # name: hidden size, intermediate size, layers, attention heads
    "tiny": (256, 512, 2, 4),  # to try a script itself
    "0.5b": (1024, 3072, 28, 16),  # 0.48 B with the small vocabulary
    "4b": (2560, 9728, 36, 32),  # 3.7 B
    "8b": (4096, 12288, 36, 32),  # 7.1 B
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ROOT = Path(__file__).parents[1]
CHAT_TEMPLATE = ROOT / "tests" / "support" / "templates" / "qwen3-2507.jinja"
MARKS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
CHAT_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
NUM_MERGES = 8000


def write_random_qwen(
    directory: Path, size: str = "0.5b", vocab_size: int = VOCAB, *, is_for_chat: bool = False
) -> Path:
    """Write the model, unless it is there. It is made on the GPU if there is one."""
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=_build_tokenizer(vocab_size, is_for_chat=is_for_chat),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE.read_text("utf-8") if is_for_chat else TEMPLATE,
    )
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = build_config(size, vocab_size)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory


def _build_tokenizer(vocab_size: int, *, is_for_chat: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    pieces, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), list[tuple[str, str]]()
    marks = [*MARKS, *(CHAT_MARKS if is_for_chat else ())]
    if is_for_chat:
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(False)
        texts = [file.read_text("utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
        trainer = trainers.BpeTrainer(vocab_size=NUM_MERGES, initial_alphabet=pieces, show_progress=False)
        trained.train_from_iterator(texts, trainer)
        saved = json.loads(trained.to_str())["model"]
        pieces, merges = list(saved["vocab"]), [tuple(merge) for merge in saved["merges"]]
    words = [f"w{number}" for number in range(vocab_size)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*marks, *pieces, *words]))}
    vocab = {token: index for token, index in vocab.items() if index < vocab_size}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=is_for_chat)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in marks[len(MARKS) :]])
    return tokenizer


def build_config(size: str, vocab_size: int = VOCAB) -> Any:
    """Return the config of the model."""
    from transformers import Qwen3Config

    hidden_size, intermediate_size, num_layers, num_heads = SIZES[size]
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=min(8, num_heads),
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=0,
        pad_token_id=2,
    )


def write_shapes(directory: Path, size: str, vocab_size: int = VOCAB) -> Path:
    """Write config and weights whose file has only names and shapes: enough to plan a run, and no space on the disk."""
    import torch
    from transformers import AutoModelForCausalLM

    config = build_config(size, vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {}
    offset = 0
    for name, weight in model.named_parameters():  # without tied copies
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [offset, offset + weight.nbytes]}
        offset += weight.nbytes
    text = json.dumps(header).encode()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # sparse
    config.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    directory, *choices = sys.argv[1:]
    size, vocab_size, kind = [*choices, *["0.5b", str(VOCAB), ""][len(choices) :]]
    print(write_random_qwen(Path(directory), size, int(vocab_size), is_for_chat=kind == "chat"))
