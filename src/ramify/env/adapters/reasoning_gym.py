"""reasoning-gym: the procedural datasets of reasoning-gym by name, with their own scorers.

A task stores the index of its entry, not the entry: entries are generated again from the seed when they are scored, so
metadata need not be JSON.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from pydantic import Field

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.core.names import suggest
from ramify.env.adapters import import_package
from ramify.env.tasksets.splits import EVAL_SHARE, assign_split

# The datasets of reasoning-gym 0.1.25 that cannot be trained on, with the reason.
#
# `make test-envs` checks the list: every other dataset scores its own answers with more than 0, and does not raise on
# replies that make no sense or give them the full score.

NO_ANSWER = "its entries have no answer, so its scorer cannot be validated"

REFUSALS = {
    "boxnet": NO_ANSWER,
    "coin_flip": "its scorer gives the full score to every prefix of the answer, such as 0",
    "composite": "it is a mixture of other datasets; use one source for each of them",
    "game_of_life": "its scorer raises on replies that are JSON but no board",
    "game_of_life_halting": "its scorer gives the full score to every reply that is not empty",
    "graph_color": NO_ANSWER,
    "prime_factorization": "its scorer raises on replies that are not a product of integers",
    "propositional_logic": NO_ANSWER,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
}


CACHED_ENTRIES = 1024
INSTRUCTIONS = "Solve the problem. Write the final answer, and nothing else, between <answer> and </answer>."


class ReasoningGymConfig(rf.TasksetConfig):
    """The dataset, its difficulty, and its size."""

    dataset: str
    """The name of a dataset of reasoning-gym, such as `basic_arithmetic`."""
    parameters: dict[str, Any] = {}
    """Parameters of the dataset, such as its difficulty. Default: its own."""
    level: int | None = Field(default=None, ge=0)
    """The difficulty: all attributes of the dataset's curriculum at this level, or at their highest if that is lower.
    Default: no curriculum."""
    seed: int = 0
    size: int = Field(default=2000, ge=1)
    """Number of generated entries, of both splits together. Entries with the same question count once."""
    eval_share: float = Field(default=EVAL_SHARE, ge=0, le=1)
    """The share of entries, chosen by their questions, in the `eval` split."""
    instructions: str = INSTRUCTIONS
    """The system prompt."""
    answer_tag: str = Field(default="answer", pattern=r"^\w+$")
    """The tag around the answer, as the instructions name it. The last such pair in a reply counts."""


class ReasoningGymTask(rf.Task):
    """An entry of the dataset, by its index."""

    index: int


class ReasoningGym(rf.Taskset):
    """Questions of one dataset of reasoning-gym."""

    config: ReasoningGymConfig
    task_type = ReasoningGymTask

    def __init__(self, config: ReasoningGymConfig) -> None:
        super().__init__(config)
        import_package("reasoning_gym", "reasoning-gym", "reasoning-gym")  # registers the datasets
        factory: Any = import_package("reasoning_gym.factory", "reasoning-gym", "reasoning-gym")
        utils: Any = import_package("reasoning_gym.utils", "reasoning-gym", "reasoning-gym")
        self._extract_answer = utils.extract_answer
        self._dataset = _create_dataset(config, factory)
        self._lock = threading.Lock()  # rewards run in threads
        self.get_entry = lru_cache(maxsize=CACHED_ENTRIES)(self._generate_entry)

    def load(self) -> Iterator[ReasoningGymTask]:
        """Yield the entries of the split, in the order of their indices."""
        questions: set[str] = set()
        for index in range(len(self._dataset)):
            question = self.get_entry(index)["question"]
            is_selected = assign_split(question, self.config.eval_share) == self.config.split
            if is_selected and question not in questions:
                questions.add(question)
                yield ReasoningGymTask(prompt=question, system=self.config.instructions or None, index=index)

    @rf.reward
    def score(self, task: ReasoningGymTask, trace: rf.Trace) -> float:
        """The score of the dataset's own scorer for the text between the last answer tags."""
        answer = self._extract_answer(trace.last_reply, self.config.answer_tag)
        with self._lock:
            return float(self._dataset.score_answer(answer, self.get_entry(task.index)))

    @rf.metric
    def answered(self, trace: rf.Trace) -> float:
        """Whether the reply has answer tags."""
        return float(self._extract_answer(trace.last_reply, self.config.answer_tag) is not None)

    def gold(self, task: ReasoningGymTask) -> str:
        """Return the answer of the entry in its tags."""
        tag = self.config.answer_tag
        return f"<{tag}>{self.get_entry(task.index)['answer']}</{tag}>"

    def _generate_entry(self, index: int) -> dict[str, Any]:
        """Return an entry. Raises EnvironmentFault if it has no answer."""
        entry = self._dataset[index]
        if entry["answer"] is None:
            raise EnvironmentFault(f"reasoning-gym: entry {index} of {self.config.dataset} has no answer")
        return entry


def _create_dataset(config: ReasoningGymConfig, factory: Any) -> Any:
    """Return the dataset. Raises ConfigInvalid for a name or a parameter that is not usable."""
    name = config.dataset
    if name in REFUSALS:
        raise ConfigInvalid(f"{name} cannot be used: {REFUSALS[name]}", key="taskset.dataset")
    if name not in factory.DATASETS:
        hint = suggest(name, sorted(factory.DATASETS), "docs/other-environments.md says how to list them")
        raise ConfigInvalid(f"unknown dataset {name!r}; {hint}", key="taskset.dataset")
    defaults = {"seed": config.seed, "size": config.size}
    try:
        if config.level is None:
            return factory.create_dataset(name, **defaults, **config.parameters)
        if not factory.has_curriculum(name):
            raise ConfigInvalid(f"{name} has no curriculum; set `parameters` instead", key="taskset.level")
        curriculum = factory.create_curriculum(name)
        for attribute, definition in curriculum.attributes.items():
            curriculum.set_attr_level(attribute, min(config.level, len(definition.levels) - 1))
        dataset_class, _ = factory.DATASETS[name]
        return dataset_class(config=curriculum.generate_configuration({**defaults, **config.parameters}))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigInvalid(f"{name} refuses them: {error}", key="taskset.parameters") from error
