"""The base of all judges: a call to the model, the format of its verdict, its repair, its cache and its record."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar
from weakref import WeakValueDictionary

import msgspec
from pydantic import Field

from ramify.core.config.schema import is_dict
from ramify.core.errors import ConfigInvalid, JudgeError, ProviderError
from ramify.env.chat_client import EXCERPT_CHARS, ChatClient, ChatClientConfig, ChatCompletion
from ramify.env.judges.cache import ReplyCache, cache_directory, compute_cache_key
from ramify.env.task import Task
from ramify.trace import Trace

T = TypeVar("T")
TOKENS_PER_PRICE = 1e6  # prices are per million tokens
REPAIR_PROMPT = "This verdict cannot be read: {problem}. Reply again, with nothing but the JSON object."


@dataclass(frozen=True, slots=True)
class VerdictFormat(Generic[T]):
    """The JSON object that a judge replies with.

    - `fields`: the JSON schema of each field, all of which are required. A text `reason` comes before them.
    - `parse`: returns the value of a verdict. It raises ValueError, which says what is wrong, for the model to repair.
    """

    fields: Mapping[str, Any]
    parse: Callable[[dict[str, Any]], T]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the verdict."""
        return build_object_schema({"reason": {"type": "string"}, **self.fields})

    def read(self, text: str) -> T:
        """Return the value of the verdict in a reply. Raises ValueError if it has none."""
        return self.parse(parse_last_json_object(text))


def build_object_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these fields."""
    return {"type": "object", "properties": dict(fields), "required": [*fields], "additionalProperties": False}


def parse_last_json_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text. Judges often write an explanation before it, or a code fence around it."""
    end = text.rfind("}") + 1
    for start in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            value = msgspec.json.decode(text[start:end])
        except (msgspec.DecodeError, RecursionError):
            continue
        if is_dict(value):
            return value
    raise ValueError(f"expected a JSON object, found {format_tail(text)}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a JSON object is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_tail(text: str) -> str:
    """Return the end of a text for an error message."""
    return repr(text if len(text) <= EXCERPT_CHARS else f"...{text[-EXCERPT_CHARS:]}")


class JudgeConfig(ChatClientConfig):
    """The model of a judge, with the keys of `ChatClientConfig`.

    - `id`: the form of the judge: `reference`, `rubric`, `pairwise` or `relative`.
    - `temperature`: the temperature of the judge; 0 unless it is set.
    - `prompt_price`, `completion_price`: the price of a million tokens, for the metric `judge/cost`.
    - `cache_mib`: maximum size of the cache of replies, in MiB. 0: no cache.
    """

    id: str = "reference"
    temperature: float | None = Field(default=0.0, ge=0)
    prompt_price: float = Field(default=0.0, ge=0)
    completion_price: float = Field(default=0.0, ge=0)
    cache_mib: int = Field(default=1024, ge=0)


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """What a judge decided: the value of its verdict, and the text of its reply."""

    value: T
    text: str


class Judge:
    """Scores replies with a model.

    A subclass implements `score`, or `score_group` if it compares the attempts at a task; both call `ask`.

    - `config`: the model of the judge, and the options of a subclass.
    """

    config: JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._client = ChatClient(config)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._cache: ReplyCache | None = None

    @staticmethod
    def load(table: dict[str, Any]) -> "Judge":
        """Return the judge described by a table of a taskset's config, such as `{id = "rubric", base_url = ...}`."""
        from ramify.env.plugin import build_plugin

        return build_plugin("judge", table)

    async def score(self, task: Task, trace: Trace, *, reply: str | None = None) -> float:
        """Return the score of a reply, by default the last one of the trace.

        Raises JudgeError if the judge cannot be reached or its verdict cannot be read.
        """
        raise ConfigInvalid(
            f"the judge {self.config.id!r} compares the attempts at a task; call `score_group` in an @rf.group_reward"
        )

    async def score_group(self, task: Task, traces: Sequence[Trace]) -> list[float]:
        """Return the score of the last reply of each trace. Raises JudgeError as `score` does."""
        return await gather_all(self.score(task, trace) for trace in traces)

    async def ask(self, traces: Sequence[Trace], prompt: str, verdict_format: VerdictFormat[T]) -> Verdict[T]:
        """Return the model's verdict on the traces, from the cache if the same was asked before.

        The calls are counted in the metrics of the traces, in equal shares. Raises JudgeError.
        """
        config, messages = self.config, [{"role": "user", "content": prompt}]
        sampling = [config.temperature, config.max_tokens]
        key = compute_cache_key([config.resolve()[1], sampling, verdict_format.schema, messages])
        lock = self._locks.setdefault(key, asyncio.Lock())  # calls at the same time share one reply
        async with lock:
            cache = self._open_cache()
            if cache is not None and (text := await cache.read(key)) is not None:
                with contextlib.suppress(ValueError):  # other code has read it
                    verdict = Verdict(verdict_format.read(text), text)
                    self._count_calls(traces, (), num_cached=1)
                    return verdict
            verdict = await self._call_model(traces, messages, verdict_format)
            if cache is not None:
                await cache.write(key, verdict.text)
            return verdict

    def _open_cache(self) -> ReplyCache | None:
        if self._cache is None and self.config.cache_mib and (directory := cache_directory.get()) is not None:
            self._cache = ReplyCache(directory, self.config.cache_mib << 20)
        return self._cache

    async def _call_model(
        self, traces: Sequence[Trace], messages: Sequence[dict[str, str]], verdict_format: VerdictFormat[T]
    ) -> Verdict[T]:
        """Call the model, and once more if its verdict cannot be read."""
        completions: list[ChatCompletion] = []
        try:
            completions.append(await self._client.complete(messages, schema=verdict_format.schema))
            try:
                return Verdict(verdict_format.read(completions[0].text), completions[0].text)
            except ValueError as error:
                repair_prompt = REPAIR_PROMPT.format(problem=error)
            reply = {"role": "assistant", "content": completions[0].text}
            repair = [*messages, reply, {"role": "user", "content": repair_prompt}]
            completions.append(await self._client.complete(repair, schema=verdict_format.schema))
            return Verdict(verdict_format.read(completions[1].text), completions[1].text)
        except ProviderError as error:
            raise JudgeError(f"the judge cannot be reached: {error.message}") from error
        except ValueError as error:
            raise JudgeError(f"the verdict of the judge {self.config.id!r} cannot be read: {error}") from error
        finally:
            self._count_calls(traces, completions)

    def _count_calls(
        self, traces: Sequence[Trace], completions: Sequence[ChatCompletion], *, num_cached: int = 0
    ) -> None:
        """Add calls to the metrics of the traces. These tokens belong to no rollout, but they are paid for."""
        prompt = sum(completion.usage.prompt_tokens for completion in completions)
        sampled = sum(completion.usage.completion_tokens for completion in completions)
        totals = {
            "judge/calls": len(completions),
            "judge/cached": num_cached,
            "judge/prompt_tokens": prompt,
            "judge/completion_tokens": sampled,
            "judge/seconds": sum(completion.seconds for completion in completions),
        }
        if self.config.prompt_price or self.config.completion_price:
            cost = prompt * self.config.prompt_price + sampled * self.config.completion_price
            totals["judge/cost"] = cost / TOKENS_PER_PRICE
        for trace in traces:
            for name, total in totals.items():
                trace.metrics[name] = trace.metrics.get(name, 0.0) + total / len(traces)

    def record_score(self, trace: Trace, score: float, text: str = "") -> None:
        """Store a score and the text of its verdict in `trace.info["judge"]`, a list of both."""
        entry = {"judge": self.config.id, "score": score, **({"text": text} if text else {})}
        trace.info["judge"] = [*trace.info.get("judge", []), entry]


async def gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; if any of them fail, raise the first failure after all have ended.

    The verdicts of the others are in the cache by then, so that a retry repeats only calls that failed.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def format_task(task: Task) -> str:
    """Return the task as a judge reads it: its prompt, and its reference answer if it has one."""
    if task.prompt is None or isinstance(task.prompt, str):
        question = task.prompt or ""
    else:
        question = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in task.prompt)
    answer = "" if task.answer is None else f"\n\n# Reference answer\n{task.answer}"
    return f"# Task\n{question}{answer}"
