"""What do a server's logprobs mean? Asked before the first token is trained on, because afterwards it is too late.

Training needs log softmax(logits / T) of the sampled token. Some servers give log softmax(logits), which is the same
number at T = 1 and silently another one everywhere else. So the same place is asked at two temperatures for its most
likely tokens. Between two tokens the normaliser cancels, and what is left is the difference of their logits: divided by
T where logprobs come after temperature, and unchanged where they come before.
"""

import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import ClientSampling
from ramify.client.generate_api import GenerateRequest, GenerateResponse, decode_json
from ramify.client.http_client import send_request
from ramify.client.native_adapter import GENERATE_PATH
from ramify.client.replica_pool import Replica
from ramify.errors import LogprobMismatch, TokensRequired

PROMPTS: tuple[tuple[int, ...], ...] = ((3, 5, 7), (11, 4, 9, 6), (8,), (5, 5, 12, 10))
TEMPERATURE = 2.0
TOP_K = 5
SLOPE_TOLERANCE = 0.1  # of the slope, which is 1/T or 1; engines that compute in bfloat16 are a few percent off
MIN_SPREAD = 0.05  # nats between the tokens that are compared; less cannot be told from rounding


async def check_logprobs(replica: Replica) -> None:
    """Raise LogprobMismatch unless the server's logprobs come after temperature."""
    for place in PROMPTS:
        plain, heated = (
            await _get_top_logprobs(replica, place, 1.0),
            await _get_top_logprobs(replica, place, TEMPERATURE),
        )
        shared = sorted(set(plain) & set(heated))
        before, after = (np.array([table[token] for token in shared]) for table in (plain, heated))
        if len(shared) < 2 or np.ptp(before) < MIN_SPREAD:
            continue  # nearly the same probability: this place tells nothing
        slope = _fit_slope(before, after)
        if abs(slope - 1 / TEMPERATURE) <= SLOPE_TOLERANCE:
            return
        if abs(slope - 1) <= SLOPE_TOLERANCE:
            said = "its logprobs do not depend on the temperature; start vLLM with --logprobs-mode processed_logprobs"
        else:
            said = f"between T = 1 and T = {TEMPERATURE:g} its logprobs scale by {slope:.2f}, expected 0.5"
        raise LogprobMismatch(f"{replica.url} cannot be trained on: {said}")
    said = f"at {len(PROMPTS)} places all tokens are equally likely"
    raise LogprobMismatch(f"{replica.url}: the meaning of its logprobs cannot be found out: {said}")


def _fit_slope(before: NDArray[np.float64], after: NDArray[np.float64]) -> float:
    """How differences between logprobs changed."""
    x, y = before - before.mean(), after - after.mean()
    return float(x @ y / (x @ x))


async def _get_top_logprobs(replica: Replica, prompt_ids: tuple[int, ...], temperature: float) -> dict[int, float]:
    """The most likely tokens after `place`, with their logprobs."""
    body = GenerateRequest(
        prompt_ids, ClientSampling(temperature=temperature, max_tokens=1, seed=0, ignore_eos=True)
    ).to_dict()
    body["sampling_params"]["logprobs"] = TOP_K
    answer = decode_json(await send_request(replica.http, "POST", GENERATE_PATH, body), GenerateResponse, replica.url)
    logprobs = answer.choices[0].logprobs
    try:
        content = logprobs.content if logprobs is not None else None
        return {_parse_token_id(entry): float(entry["logprob"]) for entry in (content or [])[0].top_logprobs}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TokensRequired(f"{replica.url} gives no logprobs of the most likely tokens: {error!r}") from error


def _parse_token_id(entry: dict[str, object]) -> int:
    """The id of a token: spelled out by some, as `token_id:7` by others."""
    return int(str(entry["token_id"] if "token_id" in entry else entry["token"]).removeprefix("token_id:"))
