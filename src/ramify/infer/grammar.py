"""Grammars of replies: which tokens may follow, as one bit per token of the vocabulary.

llguidance compiles a grammar and computes the bits; it is loaded with the first grammar. A request's `GrammarState`
advances with each of its tokens, so its next mask can be computed only when its last token is known. A mask allows the
stop tokens only where the grammar may end.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import RequestInvalid
from ramify.model.render.reply_grammar import build_json_rule
from ramify.model.render.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILE_TIMEOUT = 20.0  # seconds; most grammars take milliseconds, and the library's limits end others
MAX_GRAMMAR_CHARS = 1 << 20
MAX_GRAMMAR_SYMBOLS = 20_000  # about a thousand properties; the time to compile is quadratic in their number
MAX_LEXER_STATES = 50_000  # of a grammar, at one to two kilobytes each
MAX_CACHED_GRAMMARS = 64
MAX_REASON_CHARS = 500  # of the library's error messages
NUM_COMPILER_THREADS = 2


class GrammarState:
    """The progress of one reply in its grammar."""

    def __init__(self, matcher: "LLMatcher", executor: "LLExecutor") -> None:
        self.matcher = matcher
        self.executor = executor
        """The threads that compute the masks of a step, the same for all states of a compiler."""

    def fork(self) -> "GrammarState":
        """Return an independent copy, for another sample of the same prompt."""
        return GrammarState(self.matcher.deep_copy(), self.executor)

    def advance(self, token: int) -> RequestInvalid | None:
        """Add a sampled token; return the error if the grammar was too complex to be followed."""
        if self.matcher.consume_token(token) and not self.matcher.is_error():  # after an error, it takes a stop token
            return None
        reason = _shorten(self.matcher.get_error())
        return RequestInvalid(f"the grammar of the reply could not be followed to its end: {reason}")


class GrammarCompiler:
    """Compiles grammars for a tokenizer, in threads. `stop_ids` are the tokens that end a reply."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, sorted(stop_ids)
        self._compiled: BoundedCache[str, GrammarState] = BoundedCache(MAX_CACHED_GRAMMARS)
        self._threads = ThreadPoolExecutor(NUM_COMPILER_THREADS, thread_name_prefix="grammar")

    async def compile(self, grammar: str) -> GrammarState:
        """Return the initial state of a grammar in Lark syntax.

        Raises RequestInvalid if the grammar is invalid or too complex, or if llguidance is missing.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            problem = f"the JSON schemas of a request have {len(grammar)} characters"
            raise RequestInvalid(f"{problem}; at most {MAX_GRAMMAR_CHARS} are supported")
        state = self._compiled.get(grammar)
        if state is None:
            compilation = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar)
            try:
                state = await asyncio.wait_for(compilation, COMPILE_TIMEOUT)
            except TimeoutError as error:
                advice = "simplify the JSON schema, or send it again if the server was busy"
                raise RequestInvalid(f"a grammar was not compiled within {COMPILE_TIMEOUT:g} s; {advice}") from error
            self._compiled.put(grammar, state)
        return state.fork()

    def _compile(self, grammar: str) -> GrammarState:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            problem = "structured output: the server lacks llguidance; pip install 'ramify[local]'"
            raise RequestInvalid(problem) from error
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SYMBOLS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        matcher = LLMatcher(self._grammar_tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestInvalid(f"the JSON schema or grammar cannot be used: {_shorten(matcher.get_error())}")
        return GrammarState(matcher, self._executor)

    @cached_property
    def _grammar_tokenizer(self) -> "LLTokenizer":
        """The tokenizer with its vocabulary sorted, which takes about a second for a large one."""
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=self._stop_ids)
        except ValueError as error:
            problem = "structured output: llguidance does not support the model's tokenizer"
            raise RequestInvalid(f"{problem}: {_shorten(str(error))}") from error

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()


def build_grammar(structured_outputs: Mapping[str, Any]) -> str:
    """Return the grammar of vLLM's field `structured_outputs`; a `grammar` in it is in the Lark syntax of llguidance.

    Raises RequestInvalid for the kinds that are not supported.
    """
    given = {name: value for name, value in structured_outputs.items() if value not in (None, False)}
    match given:
        case {"json_object": True, **others} if not others:
            return f"start: {build_json_rule({'type': 'object'})}"
        case {"json": dict(schema), **others} if not others:
            return f"start: {build_json_rule(schema)}"
        case {"grammar": str(grammar), **others} if not others:
            return grammar
        case _:
            expected = "one of json (a schema), json_object and grammar (Lark)"
            raise RequestInvalid(f"structured_outputs: expected {expected}, got {', '.join(given) or 'none'}")


def mask_logits(logits: Tensor, grammars: Sequence[tuple[int, GrammarState]]) -> None:
    """Set the logits of tokens that may not follow to -inf, in place; each grammar applies to one row of the logits."""
    masks = _compute_masks([state for _, state in grammars], logits)
    packed = masks.to(logits.device, non_blocking=True).view(torch.uint8).unsqueeze(-1)
    bits = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    is_allowed = bits.view(len(masks), -1)[:, : logits.shape[1]].bool()
    rows = torch.tensor([row for row, _ in grammars], device=logits.device)
    logits[rows] = logits[rows].masked_fill_(~is_allowed, float("-inf"))


def _compute_masks(states: Sequence[GrammarState], logits: Tensor) -> Tensor:
    """Return the tokens that may follow, [states, words of 32 bits], on the host."""
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    num_words = -(-logits.shape[1] // 32)
    masks = torch.empty((len(states), num_words), dtype=torch.int32, pin_memory=logits.device.type == "cuda")
    if len(states) == 1:
        fill_next_token_bitmask(states[0].matcher, masks.numpy())
    else:
        matchers = [(state.matcher, row) for row, state in enumerate(states)]
        fill_next_token_bitmask_par(states[0].executor, matchers, masks.numpy())
    return masks


def _shorten(message: str) -> str:
    """Return the first line of an error message of the library."""
    return message.partition("\n")[0][:MAX_REASON_CHARS]
