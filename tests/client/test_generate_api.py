"""An answer that is not what was asked for is noticed where it is read."""

import numpy as np
import pytest

from ramify.client.generate_api import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateResponse,
    TokenLogprob,
    decode_json,
    get_sampled_tokens,
    parse_prompt_logprobs,
)
from ramify.errors import ProviderError


def test_prompt_logprobs_are_one_for_each_token():
    table = [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}, "7": {"logprob": -0.5}}]
    found = parse_prompt_logprobs(GenerateResponse([], prompt_logprobs=table), [4, 5, 6], "a server")
    assert np.isnan(found[0]) and found[1:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    "entry", [None, {}, {"9": {"logprob": -1.0}}, {"5": {"logprob": None}}, {"5": {"logprob": "?"}}]
)
def test_a_prompt_token_without_a_logprob_is_named(entry):
    table = [None, entry, {"6": {"logprob": -2.0}}]
    with pytest.raises(ProviderError, match="a server answered prompt logprobs without the prompt's own tokens"):
        parse_prompt_logprobs(GenerateResponse([], prompt_logprobs=table), [4, 5, 6], "a server")


@pytest.mark.parametrize("logprob", ["NaN", "-Infinity", "-1e400", "-1e39", "1e39", "null"])
def test_a_sampled_token_whose_logprob_is_no_finite_number_is_the_servers_fault(logprob):
    entries = f'[{{"logprob": -0.5}}, {{"logprob": {logprob}}}]'
    body = f'{{"choices": [{{"token_ids": [5, 6], "logprobs": {{"content": {entries}}}}}]}}'
    with pytest.raises(ProviderError, match="a server answered"):
        get_sampled_tokens(decode_json(body, GenerateResponse, "a server").choices[0], "a server")


def test_the_token_and_its_logprob_are_named():
    choice = GenerateChoice([5, 6], logprobs=ChoiceLogprobs([TokenLogprob(-0.5), TokenLogprob(-1e39)]))
    with pytest.raises(ProviderError, match=r"a server answered logprob -1e\+39 for token 1"):
        get_sampled_tokens(choice, "a server")
