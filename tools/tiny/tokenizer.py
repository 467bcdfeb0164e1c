"""The tokenizer, chat template and config of `tiny`, an ordinary Hugging Face directory whose tokens are bytes.

Reversing or sorting text is about characters, so every byte is a token and nothing is merged. The exceptions are the
markers of conversations, tool calls and tagged answers: one token each, which keeps prompts and replies short and lets
a small model spend its capacity between the tags. Tools are shown as signatures for the same reason: a JSON schema of
three lines would cost hundreds of tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MAX_POSITIONS = 2048
VOCAB_SIZE = 288  # 256 bytes, the added tokens, and space for more
ADDED_TOKENS = [
    *(f"<{slash}{tag}>" for tag in ("tool_call", "tool_response", "reversed_text") for slash in ("", "/")),
    *(f"<{slash}{kind}alphabetical_sorted>" for kind in ("", "combined_") for slash in ("", "/")),
    " // new name!",
    "\\boxed{",
    *('{"name": "', '", "arguments": {', '": "', '": ', '", "', ', "', '"}}', "}}"),
    *(f"{role}\n" for role in ("system", "user", "assistant", "tool")),
]
CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}
{%- if tools -%}
{{ '\\n\\n' if system }}Tools:
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ '\\n' + function.name }}(
{%- for name, schema in ((function.parameters or {}).properties or {}).items() -%}
{{ ', ' if not loop.first }}{{ name }}: {{ schema.type or 'any' }}
{%- endfor -%}
) {{ function.description or '' }}
{%- endfor -%}
{{ '\\n' }}Call with <tool_call>{"name": "...", "arguments": {...}}</tool_call>
{%- endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('a system message must be the first') }}
{%- elif message.role == 'tool' -%}
<|im_start|>tool
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{"name": {{ function.name | tojson }}, "arguments": {{ function.arguments if function.arguments is string \
else function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer(more_special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Build the tokenizer: bytes and added tokens. Padding and the ends of messages are special: texts omit them.

    `more_special_tokens` get the ids after all others.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: id for id, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, IM_START, IM_END)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more_special_tokens])
    return tokenizer


def build_model_config() -> LlamaConfig:
    """Build the config, of 1.3 million parameters in four layers: more layers would slow down decoding on a CPU."""
    tokenizer = build_tokenizer()
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},  # two thirds of the angles are slow
        initializer_range=0.06,  # 0.02 is for wide models: here initial attention would be uniform
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="bfloat16",
    )


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None = None, chat_template: str = CHAT_TEMPLATE) -> None:
    """Write `tokenizer.json`, and `tokenizer_config.json` with the chat template."""
    (tokenizer or build_tokenizer()).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
