"""Small model directories, one per chat template, built offline: only the files that rendering needs.

The templates in `templates/` are written after the originals. Tokenizers are byte-level BPE trained on a page of
text, with the control tokens of their family and the pre-tokenizer that Qwen and Llama 3 use; the older families get
one that treats spaces as SentencePiece does.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ramify.model.render import FamilyRendererConfig, Renderer, TemplateRendererConfig, load_renderer

TEMPLATES = Path(__file__).parent / "templates"
TEXT = (Path(__file__).parent.parent.parent / "docs" / "architecture.md").read_text("utf-8")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = [*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
MISTRAL = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"),
]
GLM = ["[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
LLAMA = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "<|python_tag|>",
]


@cache
def make_scratch() -> tempfile.TemporaryDirectory[str]:
    """Make the directory of this process, which is removed when the process ends; a forked process has its own."""
    return tempfile.TemporaryDirectory(prefix="ramify-render-")


@dataclass(frozen=True)
class Model:
    """A template with its tokens, and the conversations that it supports."""

    name: str
    tokens: Sequence[str]
    stops: Sequence[str]
    bos: str | None = None
    template: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    spaces: bool = False  # the tokenizer treats spaces as SentencePiece does
    tools: bool = False
    calls_at_once: int = 2
    content_beside_calls: bool = True
    reasoning: bool = False  # whether the last reply shows reasoning; it may be dropped later
    format: str = "none"
    rewrites: bool = False  # the template is not append-only

    def __str__(self) -> str:
        return self.name

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.template or self.name}.jinja").read_text("utf-8")


MODELS = [
    Model("chatml", CHATML, ["<|im_end|>"], reasoning=True),
    Model("ramify", QWEN, ["<|im_end|>"], tools=True, reasoning=True, format="hermes"),
    Model("smollm2", CHATML, ["<|im_end|>"], reasoning=True),
    Model("llama-3", LLAMA[:6], ["<|eot_id|>", "<|end_of_text|>"], "<|begin_of_text|>", reasoning=True),
    Model(
        *("llama-3.1", LLAMA, ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|begin_of_text|>"),
        tools=True,
        calls_at_once=1,
        content_beside_calls=False,
        format="llama-3",
    ),
    Model("mistral-v1", MISTRAL[:2], ["</s>"], "<s>", spaces=True, reasoning=True),
    Model(
        "mistral-v3", MISTRAL, ["</s>"], "<s>", tools=True, content_beside_calls=False, format="mistral", rewrites=True
    ),
    Model("mistral-v11", MISTRAL, ["</s>"], "<s>", tools=True, format="mistral"),
    Model("qwen2.5", QWEN, ["<|im_end|>", "<|endoftext|>"], tools=True, format="hermes"),
    Model("qwen3", QWEN, ["<|im_end|>", "<|endoftext|>"], tools=True, reasoning=True, format="hermes", rewrites=True),
    Model(
        *("qwen3-no-thinking", QWEN, ["<|im_end|>", "<|endoftext|>"], None, "qwen3", {"enable_thinking": False}),
        tools=True,
        format="hermes",
        rewrites=True,
    ),
    Model("qwen3-2507", QWEN, ["<|im_end|>", "<|endoftext|>"], tools=True, format="hermes"),
    Model("qwen3-coder", QWEN, ["<|im_end|>", "<|endoftext|>"], tools=True, format="qwen-coder"),
    Model("gemma", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>", "<eos>"], "<bos>"),
    Model("phi-3", ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"]),
    Model(
        *("deepseek-r1", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]),
        *(["<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>"),
        reasoning=True,
        rewrites=True,
    ),
    Model(
        *("glm-4", GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        tools=True,
        reasoning=True,
        format="hermes",
    ),
    Model("zephyr", ["<s>", "</s>"], ["</s>"], "<s>", spaces=True),
    Model("vicuna", ["<s>", "</s>"], ["</s>"], "<s>", spaces=True),
    Model(
        *("granite", ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<tool_call>"], ["<|end_of_text|>"]),
        tools=True,
        format="hermes",
    ),
]
BY_NAME = {model.name: model for model in MODELS}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a program.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}, "fast": {"type": "boolean"}}},
        },
    },
]


@cache
def tokenizer(tokens: tuple[str, ...], spaces: bool = False) -> Tokenizer:
    """A BPE tokenizer of a few hundred merges with these control tokens."""
    if spaces:
        return _with_spaces(tokens)
    built = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return built


def _with_spaces(tokens: tuple[str, ...]) -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=8)
    built.train_from_iterator(TEXT.splitlines(), trainer)
    saved = json.loads(built.to_str())
    vocab = saved["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    saved["model"]["byte_fallback"] = True
    built = Tokenizer.from_str(json.dumps(saved))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(steps)
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return built


def token_id(model: Model, token: str) -> int:
    id = tokenizer(tuple(model.tokens), model.spaces).token_to_id(token)
    assert id is not None
    return id


@cache
def directory(name: str) -> Path:
    """The model as a Hugging Face directory."""
    model = BY_NAME[name]
    built = tokenizer(tuple(model.tokens), model.spaces)
    path = Path(make_scratch().name) / name
    path.mkdir()
    built.save(str(path / "tokenizer.json"))
    named = {"eos_token": model.stops[0]} | ({"bos_token": {"content": model.bos}} if model.bos else {})
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    (path / "chat_template.jinja").write_text(model.source, "utf-8")
    eos = [token_id(model, stop) for stop in model.stops]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos if len(eos) > 1 else eos[0]}))
    return path


@cache
def renderer(name: str, history: str = "template") -> Renderer:
    config = TemplateRendererConfig(template_args=BY_NAME[name].args, history=history)
    return load_renderer(directory(name), config)


@cache
def family(name: str, tokens: tuple[str, ...]) -> Renderer:
    """A family of the `renderers` library on a locally built tokenizer."""
    path = Path(tempfile.mkdtemp(dir=make_scratch().name))
    tokenizer(tokens).save(str(path / "tokenizer.json"))
    return load_renderer(path, FamilyRendererConfig(name=name))
