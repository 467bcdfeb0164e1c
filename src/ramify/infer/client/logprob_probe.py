"""A check that a server's logprobs follow the temperature, made before the first token is trained on.

Training needs log softmax(logits / T) of the sampled token. Some servers return log softmax(logits), which is equal at
T = 1 and silently different elsewhere. So the most likely tokens after a prompt are requested at two temperatures. In
the difference of two logprobs the normaliser cancels, and the difference of the logits remains: divided by T if
logprobs are computed after temperature, unchanged if they are computed before.
"""

import numpy as np
from numpy.typing import NDArray

from ramify.core.errors import EngineIncompatible
from ramify.infer.client.completion import ClientSampling
from ramify.infer.client.generate_api import GENERATE_PATH, GenerateRequest, GenerateResponse, decode_json
from ramify.infer.client.http_client import send_request
from ramify.infer.client.replica_pool import Replica

PROMPTS: tuple[tuple[int, ...], ...] = ((3, 5, 7), (11, 4, 9, 6), (8,), (5, 5, 12, 10))
TEMPERATURE = 2.0  # compared with temperature 1
TOP_K = 5
SLOPE_TOLERANCE = 0.1  # the slope is 1/T or 1; bfloat16 engines are a few percent off
MIN_SPREAD = 0.05  # nats between the compared tokens; a smaller spread may be rounding


async def check_logprobs(replica: Replica) -> None:
    """Raise EngineIncompatible unless the server computes logprobs after temperature."""
    for prompt_ids in PROMPTS:
        plain = await _get_top_logprobs(replica, prompt_ids, 1.0)
        tempered = await _get_top_logprobs(replica, prompt_ids, TEMPERATURE)
        shared = sorted(set(plain) & set(tempered))
        plain_logprobs, tempered_logprobs = (
            np.array([logprobs[token_id] for token_id in shared]) for logprobs in (plain, tempered)
        )
        if len(shared) < 2 or np.ptp(plain_logprobs) < MIN_SPREAD:
            continue  # the tokens are almost equally likely: the slope would be noise
        slope = _fit_slope(plain_logprobs, tempered_logprobs)
        if abs(slope - 1 / TEMPERATURE) <= SLOPE_TOLERANCE:
            return
        if abs(slope - 1) <= SLOPE_TOLERANCE:
            reason = "its logprobs do not depend on the temperature; start vLLM with --logprobs-mode processed_logprobs"
        else:
            reason = f"between T = 1 and T = {TEMPERATURE:g} its logprobs scale by {slope:.2f}, expected 0.5"
        raise EngineIncompatible(f"{replica.url} cannot be trained on: {reason}")
    reason = f"after {len(PROMPTS)} prompts all tokens are equally likely"
    raise EngineIncompatible(f"{replica.url}: cannot tell whether its logprobs follow the temperature: {reason}")


def _fit_slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return the slope of the least-squares line through (x, y)."""
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


async def _get_top_logprobs(replica: Replica, prompt_ids: tuple[int, ...], temperature: float) -> dict[int, float]:
    """Return the logprobs of the most likely tokens after the prompt, by token id."""
    sampling = ClientSampling(temperature=temperature, max_tokens=1, seed=0, ignore_eos=True)
    body = GenerateRequest(prompt_ids, sampling).to_dict()
    body["sampling_params"]["logprobs"] = TOP_K
    data = await send_request(replica.http, "POST", GENERATE_PATH, body)
    logprobs = decode_json(data, GenerateResponse, replica.url).choices[0].logprobs
    try:
        content = logprobs.content if logprobs is not None else None
        return {_parse_token_id(entry): float(entry["logprob"]) for entry in (content or [])[0].top_logprobs}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineIncompatible(f"{replica.url} returns no logprobs of the most likely tokens: {error!r}") from error


def _parse_token_id(entry: dict[str, object]) -> int:
    """Return the token id, which servers send as `token_id` or as the token `token_id:7`."""
    return int(str(entry["token_id"] if "token_id" in entry else entry["token"]).removeprefix("token_id:"))
