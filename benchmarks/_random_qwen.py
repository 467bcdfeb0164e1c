"""The random model of the GPU benchmarks: Qwen3-0.6B with a smaller vocabulary, 0.48 B parameters, in bfloat16.

    _random_qwen.py DIRECTORY

Its tokenizer has the 256 bytes, two marks of messages and numbered words, so that every id it samples can be decoded.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCAB = 39_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_qwen(directory: Path) -> Path:
    """Write the model, unless it is there."""
    if (directory / "config.json").is_file():
        return directory
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    words = [f"w{number}" for number in range(VOCAB - len(alphabet) - len(marks))]
    vocab = {token: index for index, token in enumerate([*marks, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=0,
        pad_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(directory)
    return directory


if __name__ == "__main__":
    print(write_random_qwen(Path(sys.argv[1])))
