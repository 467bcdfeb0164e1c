"""The native server's dialect: it knows its versions and reports them token by token."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ramify.client.answers import Answer, Ask, decode, only_choice, prompt_logprobs, sampled, usage
from ramify.client.completion import Completion, Finish, Sampling
from ramify.client.control import Card, PauseMode, Update
from ramify.client.http import Connections, exchange
from ramify.errors import ProviderError, WeightsRefused
from ramify.model.version import Version
from ramify.trace import VersionRun

GENERATE = "/inference/v1/generate"


class Native:
    """One native server."""

    def __init__(self, url: str, http: Connections, version: Version) -> None:
        self.url, self.version = url, version
        self._http = http

    async def describe(self) -> Card:
        """What the server says about itself now."""
        return read_card(await exchange(self._http, "GET", "/v1/models"), self.url)

    async def generate(self, ask: Ask) -> Completion:
        """Take one sample."""
        answer = decode(await exchange(self._http, "POST", GENERATE, ask.body()), Answer, self.url)
        choice = only_choice(answer, self.url)
        ids, logprobs = sampled(choice, self.url)
        runs = tuple(VersionRun(*run) for run in choice.policy_versions or ())
        if sum(run.count for run in runs) != len(ids):
            raise ProviderError(f"{self.url} answered {len(ids)} tokens whose versions do not add up: {runs}")
        finish = finish_of(choice.finish_reason, self.url)
        counts = usage(answer, ask, len(ids))
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), finish, runs, counts, self.url)

    async def score(self, ids: Sequence[int], salt: str | None = None) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1."""
        return await score(self._http, self.url, ids, salt)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling."""
        await exchange(self._http, "POST", "/pause", mode=mode)

    async def resume(self) -> None:
        """Go on sampling."""
        await exchange(self._http, "POST", "/resume")

    async def update(self, update: Update, *, paused: bool) -> float:
        """Apply a published version; the server itself swaps between two steps."""
        body = {"path": str(update.directory), "kv": update.kv}
        told: dict[str, Any] = decode(await exchange(self._http, "POST", "/update_weights", body), dict, self.url)
        self.version = Version(**told["version"])
        if self.version != update.version:
            said = f"{update.directory} holds {self.version}, not {update.version}; {self.url} serves it now"
            raise WeightsRefused(said)
        return float(told["seconds"])


async def score(http: Connections, url: str, ids: Sequence[int], salt: str | None) -> NDArray[np.float32]:
    """Prompt logprobs, asked for along with one token that is thrown away."""
    body = Ask(ids, Sampling(temperature=0.0, max_tokens=1, ignore_eos=True), salt=salt).body()
    body["sampling_params"]["prompt_logprobs"] = 1
    return prompt_logprobs(decode(await exchange(http, "POST", GENERATE, body), Answer, url), ids, url)


def read_card(data: bytes, url: str) -> Card:
    """The first model of `/v1/models`."""
    try:
        card = decode(data, dict, url)["data"][0]
        version = Version(**card["version"]) if "version" in card else None
        return Card(str(card["id"]), int(card["max_model_len"]), version)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProviderError(f"{url}/v1/models names no model with a max_model_len: {error!r}") from error


def finish_of(reason: str | None, url: str) -> Finish:
    """A finish reason that we know."""
    for known in get_args(Finish):
        if reason == known:
            return known
    raise ProviderError(f"{url} ended a sample with the finish reason {reason!r}, expected stop, length or abort")
