"""Judges: models that score replies.

A judge answers in free text, so parsing its verdict can fail. An unparsable verdict is not a score of 0: a policy must
not be trained on a judge's formatting errors. It raises `JudgeError`, the reward stays None, and the attempt is run
again. The verdicts and their token usage are stored in `trace.info["judge"]`.
"""

import re
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from pydantic import Field, field_validator

from ramify.core.config import Config
from ramify.core.config.schema import is_dict
from ramify.core.errors import JudgeError, ProviderError
from ramify.core.names import find_duplicates
from ramify.env.chat_client import EXCERPT_CHARS, ChatClient, ChatClientConfig, add_usage
from ramify.env.task import Task
from ramify.trace import Trace

VERDICT_PATTERN = re.compile(r"verdict\W*(correct|incorrect)\b", re.IGNORECASE)

REFERENCE_PROMPT = """\
You check an answer against a reference. Wording does not matter, only whether both say the same.

# Question
{question}

# Reference answer
{answer}

# Answer to check
{reply}

Explain in a sentence or two, then end with one line: `Verdict: CORRECT` or `Verdict: INCORRECT`."""

RUBRIC_PROMPT = """\
You grade a reply by criteria.

# Task
{question}{answer}

# Reply to grade
{reply}

# Criteria
{criteria}

Explain briefly, then end with one JSON object that gives each criterion, by its name, a score from 0 (not met) to 1
(fully met)."""


class JudgeConfig(ChatClientConfig):
    """The model of a judge, with the keys of `ChatClientConfig`.

    - `id`: the id that selects the judge.
    - `temperature`: the temperature of the judge; 0 unless it is set.
    """

    id: str = "reference"
    temperature: float | None = Field(default=0.0, ge=0)


class Judge(ABC):
    """Scores replies with a model. A subclass implements `build_prompt` and `parse_score`.

    - `config`: the model of the judge, and the options of a subclass.
    """

    config: JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._client = ChatClient(config)

    @staticmethod
    def load(table: dict[str, Any]) -> "Judge":
        """Return the judge described by a table of a taskset's config, such as `{id = "rubric", base_url = ...}`."""
        from ramify.env.plugin import build_plugin

        return build_plugin("judge", table)

    async def score(self, task: Task, trace: Trace, *, reply: str | None = None) -> float:
        """Return the score of a reply, by default the last one of the trace.

        Raises JudgeError if the judge cannot be reached or its verdict cannot be parsed.
        """
        reply = trace.last_reply if reply is None else reply
        try:
            completion = await self._client.complete([{"role": "user", "content": self.build_prompt(task, reply)}])
        except ProviderError as error:
            raise JudgeError(f"the judge cannot be reached: {error.message}") from error
        add_usage(trace, "judge", completion.usage)
        score = self.parse_score(completion.text)
        judge_info = trace.info["judge"]
        verdict = {"judge": self.config.id, "score": score, "said": completion.text}
        trace.info["judge"] = {**judge_info, "verdicts": [*judge_info.get("verdicts", []), verdict]}
        return score

    @abstractmethod
    def build_prompt(self, task: Task, reply: str) -> str:
        """Return the prompt for the judge."""

    @abstractmethod
    def parse_score(self, verdict: str) -> float:
        """Return the score in the judge's answer. Raises JudgeError if the answer contains none."""


class ReferenceJudge(Judge):
    """Compares a reply with the task's `answer`: the score is 1 if both say the same, else 0."""

    def build_prompt(self, task: Task, reply: str) -> str:
        """Return a prompt with the question, the reference answer and the reply."""
        return REFERENCE_PROMPT.format(question=_format_task(task), answer=task.answer, reply=reply)

    def parse_score(self, verdict: str) -> float:
        """Return 1.0 or 0.0 for the last verdict in the answer."""
        verdicts = VERDICT_PATTERN.findall(verdict)
        if not verdicts:
            raise JudgeError(
                f"expected a last line 'Verdict: CORRECT' or 'Verdict: INCORRECT', found {_format_tail(verdict)}"
            )
        return float(verdicts[-1].upper() == "CORRECT")


class RubricCriterion(Config):
    """One criterion of a rubric, with its weight in the score."""

    name: str
    """The key of its score in the judge's answer."""
    text: str
    """The criterion as the judge reads it."""
    weight: float = Field(default=1.0, gt=0)


class RubricJudgeConfig(JudgeConfig):
    """The model and the criteria of a rubric judge."""

    id: str = "rubric"
    criteria: list[RubricCriterion] = Field(min_length=1)

    @field_validator("criteria")
    @classmethod
    def _criterion_names_must_be_unique(cls, criteria: list[RubricCriterion]) -> list[RubricCriterion]:
        if duplicates := find_duplicates(criterion.name for criterion in criteria):
            raise ValueError(f"two criteria have the name {', '.join(map(repr, duplicates))}")
        return criteria


class RubricJudge(Judge):
    """Lets the model score each criterion from 0 to 1; the score is the weighted mean.

    - `config`: the model, and `criteria`, each with `name`, `text` and `weight`.
    """

    config: RubricJudgeConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def build_prompt(self, task: Task, reply: str) -> str:
        """Return a prompt with the task, the reply and all criteria."""
        criteria = "\n".join(f"- {criterion.name}: {criterion.text}" for criterion in self.config.criteria)
        answer = "" if task.answer is None else f"\n\n# Reference answer\n{task.answer}"
        return RUBRIC_PROMPT.format(question=_format_task(task), answer=answer, reply=reply, criteria=criteria)

    def parse_score(self, verdict: str) -> float:
        """Return the weighted mean of the scores in the last JSON object of the answer."""
        scores = _parse_last_json_object(verdict)
        total = 0.0
        for criterion in self.config.criteria:
            score = scores.get(criterion.name)
            if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
                raise JudgeError(
                    f"expected a score in [0, 1] for {criterion.name!r}, found {score!r} in {_format_tail(verdict)}"
                )
            total += criterion.weight * score
        return total / sum(criterion.weight for criterion in self.config.criteria)


def _format_task(task: Task) -> str:
    """Return the task's prompt as text."""
    if task.prompt is None or isinstance(task.prompt, str):
        return task.prompt or ""
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in task.prompt)


def _parse_last_json_object(verdict: str) -> dict[str, Any]:
    """Return the last JSON object in a text. Judges often write an explanation before it, or a code fence around it."""
    end = verdict.rfind("}") + 1
    for start in reversed([match.start() for match in re.finditer(r"\{", verdict)]):
        try:
            value = msgspec.json.decode(verdict[start:end])
        except msgspec.DecodeError:
            continue
        if is_dict(value):
            return value
    raise JudgeError(f"expected a JSON object with the scores, found {_format_tail(verdict)}")


def _format_tail(verdict: str) -> str:
    return repr(verdict if len(verdict) <= EXCERPT_CHARS else f"...{verdict[-EXCERPT_CHARS:]}")
