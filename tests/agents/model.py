"""A small random model with a long context: two layers, a byte-level BPE tokenizer, the template of Qwen 2.5.

The tokenizer is trained on the documentation and the source of this repository, so that the prompts of agent programs,
which are English, JSON and code, have a realistic number of tokens.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.renderers import BY_NAME, SPLIT

ROOT = Path(__file__).parent.parent.parent
VOCAB_SIZE = 4096
CONTEXT_LENGTH = 65536
FAMILY = BY_NAME["qwen2.5"]


def write_model(directory: Path) -> Path:
    """Write the model, unless it is there already."""
    if (directory / "model.safetensors").is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": FAMILY.stops[0]}))
    (directory / "chat_template.jinja").write_text(FAMILY.source, "utf-8")
    _write_weights(directory, tokenizer)
    eos_ids = [tokenizer.token_to_id(stop) for stop in FAMILY.stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return directory


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text("utf-8") for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("src/ramify/*/*.py")]]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in FAMILY.tokens])
    return tokenizer


def _write_weights(directory: Path, tokenizer: Tokenizer) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(FAMILY.stops[0]),
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).bfloat16().float().save_pretrained(directory)
