"""A stateful environment of v0 with several turns: the state holds the number, and the environment answers guesses."""

import re

import verifiers as vf
from datasets import Dataset


class GuessNumber(vf.MultiTurnEnv):
    async def setup_state(self, state, **kwargs):
        state["target"] = int(state["answer"])
        state["distances"] = []
        return state

    @vf.stop
    async def guessed(self, state) -> bool:
        return bool(state["distances"]) and state["distances"][-1] == 0

    async def env_response(self, messages, state, **kwargs):
        number = re.search(r"-?\d+", str(messages[-1].content))
        if number is None:
            state["distances"].append(100)
            return [{"role": "user", "content": "Write a number."}]
        difference = state["target"] - int(number[0])
        state["distances"].append(min(abs(difference), 100))
        return [{"role": "user", "content": "Right." if difference == 0 else "More." if difference > 0 else "Less."}]


def load_environment(num_examples: int = 20, max_turns: int = 3) -> vf.Environment:
    rows = [{"question": "Guess my number from 1 to 9.", "answer": str(1 + n % 9)} for n in range(num_examples)]

    def closeness(state) -> float:
        return 1.0 - min(state["distances"] or [100]) / 100

    def brevity(completion) -> float:
        return 1.0 / (1.0 + sum(len(str(message.content)) for message in completion))

    rubric = vf.Rubric(funcs=[closeness, brevity], weights=[1.0, 0.5])
    return GuessNumber(eval_dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
