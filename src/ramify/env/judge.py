"""Judges: another model says how good a reply is.

A judge is asked in words and answers in words, so its verdict has to be read, and may not be readable. That is no score
of 0: a policy must not be trained on what its judge failed to say. It is a `JudgeError`, the reward stays due, and the
attempt is run again. What a judge said and what it cost is kept in `trace.info["judge"]`.
"""

import re
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from pydantic import Field, field_validator

from ramify.config import Config
from ramify.env.chat_client import EXCERPT_CHARS, ChatClient, ChatClientConfig, add_usage
from ramify.env.task import Task
from ramify.errors import JudgeError, ProviderError
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
    """Which model judges."""

    id: str = "reference"
    temperature: float | None = Field(default=0.0, ge=0)


class Judge(ABC):
    """Scores replies with a model. A subclass says what it asks, and what the answer means."""

    config: JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._client = ChatClient(config)

    @staticmethod
    def load(table: dict[str, Any]) -> "Judge":
        """The judge that a table of a taskset's config describes, such as `{id = "rubric", base_url = ...}`."""
        from ramify.env.plugin import build_plugin

        return build_plugin("judge", table)

    async def score(self, task: Task, trace: Trace, *, reply: str | None = None) -> float:
        """How good the reply is, the trace's last unless given; raises JudgeError if that cannot be found out."""
        reply = trace.last_reply if reply is None else reply
        try:
            completion = await self._client.complete([{"role": "user", "content": self.build_prompt(task, reply)}])
        except ProviderError as error:
            raise JudgeError(f"the judge cannot be asked: {error.message}") from error
        add_usage(trace, "judge", completion.usage)
        score = self.parse_score(completion.text)
        judge_info = trace.info["judge"]
        verdict = {"judge": self.config.id, "score": score, "said": completion.text}
        trace.info["judge"] = {**judge_info, "verdicts": [*judge_info.get("verdicts", []), verdict]}
        return score

    @abstractmethod
    def build_prompt(self, task: Task, reply: str) -> str:
        """What the judge is asked."""

    @abstractmethod
    def parse_score(self, verdict: str) -> float:
        """The score in the judge's answer; raises JudgeError if it holds none."""


class ReferenceJudge(Judge):
    """Compares a reply with the task's `answer`: 1 if it says the same, else 0."""

    def build_prompt(self, task: Task, reply: str) -> str:
        return REFERENCE_PROMPT.format(question=_format_task(task), answer=task.answer, reply=reply)

    def parse_score(self, verdict: str) -> float:
        verdicts = VERDICT_PATTERN.findall(verdict)
        if not verdicts:
            raise JudgeError(
                f"expected a last line 'Verdict: CORRECT' or 'Verdict: INCORRECT', found {_format_tail(verdict)}"
            )
        return float(verdicts[-1].upper() == "CORRECT")


class RubricCriterion(Config):
    """One thing a good reply does."""

    name: str
    text: str
    weight: float = Field(default=1.0, gt=0)


class RubricJudgeConfig(JudgeConfig):
    """Which model judges, by which criteria."""

    id: str = "rubric"
    criteria: list[RubricCriterion] = Field(min_length=1)

    @field_validator("criteria")
    @classmethod
    def _criterion_names_must_be_unique(cls, criteria: list[RubricCriterion]) -> list[RubricCriterion]:
        names = [criterion.name for criterion in criteria]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two criteria have the name {', '.join(map(repr, duplicates))}")
        return criteria


class RubricJudge(Judge):
    """Has each criterion scored between 0 and 1; the score is their weighted mean."""

    config: RubricJudgeConfig

    def build_prompt(self, task: Task, reply: str) -> str:
        criteria = "\n".join(f"- {criterion.name}: {criterion.text}" for criterion in self.config.criteria)
        answer = "" if task.answer is None else f"\n\n# Reference answer\n{task.answer}"
        return RUBRIC_PROMPT.format(question=_format_task(task), answer=answer, reply=reply, criteria=criteria)

    def parse_score(self, verdict: str) -> float:
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
    """The task as the judge reads it."""
    if task.prompt is None or isinstance(task.prompt, str):
        return task.prompt or ""
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in task.prompt)


def _parse_last_json_object(verdict: str) -> dict[str, Any]:
    """The last JSON object in a text; judges like to think aloud before it, and to fence it."""
    for start in reversed([found.start() for found in re.finditer(r"\{", verdict)]):
        end = verdict.rfind("}") + 1
        try:
            found = msgspec.json.decode(verdict[start:end])
        except msgspec.DecodeError:
            continue
        if isinstance(found, dict):
            return found
    raise JudgeError(f"expected a JSON object with the scores, found {_format_tail(verdict)}")


def _format_tail(verdict: str) -> str:
    return repr(verdict if len(verdict) <= EXCERPT_CHARS else f"...{verdict[-EXCERPT_CHARS:]}")
