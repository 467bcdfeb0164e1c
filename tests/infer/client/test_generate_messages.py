"""Responses that are not usable are rejected when they are decoded."""

import numpy as np
import pytest

from ramify.core.errors import ProviderError, RequestInvalid
from ramify.infer.client.generate_messages import (
    GenerateResponse,
    decode_json,
    get_sampled_tokens,
    parse_prompt_logprobs,
    parse_top_logprobs,
)


def test_there_is_one_prompt_logprob_per_token():
    table = [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}, "7": {"logprob": -0.5}}]
    logprobs = parse_prompt_logprobs(GenerateResponse([], prompt_logprobs=table), [4, 5, 6], "a server")
    assert np.isnan(logprobs[0]) and logprobs[1:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    "entry", [None, {}, {"9": {"logprob": -1.0}}, {"5": {"logprob": None}}, {"5": {"logprob": "?"}}]
)
def test_a_prompt_token_without_a_logprob_is_rejected(entry):
    table = [None, entry, {"6": {"logprob": -2.0}}]
    with pytest.raises(ProviderError, match="a server returned prompt logprobs without the prompt's own tokens"):
        parse_prompt_logprobs(GenerateResponse([], prompt_logprobs=table), [4, 5, 6], "a server")


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_a_position_with_too_few_likeliest_tokens_is_rejected(num_tokens):
    table = [None, {str(token): {"logprob": -1.0 - token} for token in range(num_tokens)}]
    with pytest.raises(RequestInvalid, match=f"returned {num_tokens} likeliest tokens of a prompt's position, not 3"):
        parse_top_logprobs(GenerateResponse([], prompt_logprobs=table), "a server", start=0, top_k=3)


@pytest.mark.parametrize("logprob", ["NaN", "-Infinity", "-1e400", "-1e39", "1e39", "null"])
def test_a_logprob_that_is_not_finite_is_a_provider_error(logprob):
    entries = f'[{{"logprob": -0.5}}, {{"logprob": {logprob}}}]'
    body = f'{{"choices": [{{"token_ids": [5, 6], "logprobs": {{"content": {entries}}}}}]}}'
    with pytest.raises(ProviderError, match=r"a server (returned|sent)"):
        get_sampled_tokens(decode_json(body, GenerateResponse, "a server").choices[0], "a server")
