"""An answer that is not what was asked for is noticed where it is read."""

import numpy as np
import pytest

from ramify.client.answers import Answer, prompt_logprobs
from ramify.errors import ProviderError


def test_prompt_logprobs_are_one_for_each_token():
    table = [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}, "7": {"logprob": -0.5}}]
    found = prompt_logprobs(Answer([], prompt_logprobs=table), [4, 5, 6], "a server")
    assert np.isnan(found[0]) and found[1:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    "entry", [None, {}, {"9": {"logprob": -1.0}}, {"5": {"logprob": None}}, {"5": {"logprob": "?"}}]
)
def test_a_prompt_token_without_a_logprob_is_named(entry):
    table = [None, entry, {"6": {"logprob": -2.0}}]
    with pytest.raises(ProviderError, match="a server answered prompt logprobs without the prompt's own tokens"):
        prompt_logprobs(Answer([], prompt_logprobs=table), [4, 5, 6], "a server")
