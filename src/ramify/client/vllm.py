"""vLLM's dialect: a stock server in development mode, driven through its own endpoints.

vLLM labels its weights with a text of ours and reports for each sample which tokens came from which label. Why no token
gets a wrong one, although tokens are on their way while the label changes:
1. The engine's own thread writes the label onto the tokens of a step when it takes them from the model, and the label
   travels with them. How far behind the server's front or this client is does not matter: nothing is counted here.
2. The same thread changes the label, and only after a pause. A pause is answered when every step that was begun, those
   scheduled ahead included, has been taken in. So no token of the old weights is left that could meet a later label.
3. From before the reload until after it the label is one that names no version. Should anybody resume the server in
   between, or the reload be given up half-way, then its tokens are refused (`Unnamed`) and not given a version.
So it has to be one client that gives a server its weights; two would label each other's.

What vLLM does not have is a cache keyed by version. With `kv = "recompute"` every block is dropped and the running
requests start over. With `kv = "keep"` blocks in use cannot be dropped, so new requests are kept away from them
instead: each one carries the version in its `cache_salt`.

A directory is verified here first, down to the shapes: vLLM does not survive a reload that fails.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramify.client.answers import Answer, Ask, Span, decode, only_choice, sampled, usage
from ramify.client.completion import Completion
from ramify.client.control import Card, PauseMode, Unnamed, Update
from ramify.client.http import Busy, Connections, Lost, Unsent, exchange
from ramify.client.native import GENERATE, finish_of, read_card, score
from ramify.errors import DeadlineExceeded, ProviderError, RamifyError, RequestInvalid, WeightsRefused
from ramify.model.manifest import verify
from ramify.model.version import Version
from ramify.trace import VersionRun

RESET_DEADLINE = 10.0  # seconds for requests to let go of their blocks
RESET_PAUSE = 0.05
UNDEFINED = "undefined"  # the label of weights that were left half-way


class VLLM:
    """One vLLM server."""

    def __init__(self, url: str, http: Connections, version: Version, *, root: str | None) -> None:
        self.url, self.version = url, version
        self._http = http
        self._root = Path(root) if root and Path(root).is_dir() else None  # the model it was started with, if we see it
        self._vocab = _vocab(self._root)
        self._controlled = True

    async def describe(self) -> Card:
        """What the server says about itself now; the version it is labelled with, if the label is one of ours."""
        card = read_card(await exchange(self._http, "GET", "/v1/models"), self.url)
        return Card(card.model, card.max_model_len, Version.read(await self._label()))

    async def adopt(self) -> None:
        """Take over the label of the server's weights, or give them one."""
        try:
            label = await self._label()
        except ProviderError:
            self._controlled = False  # not in development mode: it can be sampled from, not updated
            return
        if label == UNDEFINED:
            self.version = Version(UNDEFINED)
        elif (version := Version.read(label)) is not None:
            self.version = version
        else:
            await self.label(str(self.version))

    async def label(self, label: str) -> None:
        """Name the weights that the server has."""
        await exchange(self._http, "POST", "/update_weight_version", {"new_version": label})

    async def _label(self) -> str:
        return str(decode(await exchange(self._http, "GET", "/weight_info"), dict, self.url).get("weight_version"))

    def salt(self, salt: str | None) -> str:
        """The cache salt of a request: what other weights have computed is not for it.

        A digest, because vLLM takes 128 characters at most and not all of them.
        """
        return hashlib.sha256(f"{self.version}|{salt or ''}".encode()).hexdigest()

    async def generate(self, ask: Ask) -> Completion:
        """Take one sample."""
        self._check(ask.prompt)
        body = {**ask.body(), "cache_salt": self.salt(ask.salt)}
        answer = decode(await exchange(self._http, "POST", GENERATE, body), Answer, self.url)
        choice = only_choice(answer, self.url)
        ids, logprobs = sampled(choice, self.url)
        runs = self._runs(choice.weight_versions or [], len(ids))
        finish = finish_of(choice.finish_reason, self.url)
        counts = usage(answer, ask, len(ids))
        return Completion(np.array(ids, np.int32), np.array(logprobs, np.float32), finish, runs, counts, self.url)

    async def score(self, ids: Sequence[int], salt: str | None = None) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1."""
        self._check(ids)
        return await score(self._http, self.url, ids, self.salt(salt))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; the caches stay as they are."""
        await exchange(self._http, "POST", "/pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        """Go on sampling."""
        await exchange(self._http, "POST", "/resume")

    async def update(self, update: Update, *, paused: bool) -> float:
        """Verify the directory, then pause, reload by path, drop the cache, label, resume.

        If that fails half-way the weights are no version at all: the server is left paused and labelled so, and its
        requests end with finish `abort`. If it is cancelled, they stay where they are.
        """
        if not self._controlled:
            raise WeightsRefused(f"{self.url} takes no weights: vLLM has to be started with VLLM_SERVER_DEV_MODE=1")
        manifest = await asyncio.to_thread(verify, update.directory, self._root)
        if manifest.version != update.version:
            raise WeightsRefused(f"{update.directory} holds {manifest.version}, not {update.version}")
        start = time.perf_counter()
        await self.pause("keep")
        try:
            await self.label(UNDEFINED)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.directory)}}
            await exchange(self._http, "POST", "/collective_rpc", reload)
            if update.kv == "recompute":
                await self._reset()
            await self.label(str(update.version))
        except BaseException as error:
            self.version = Version(UNDEFINED)
            if isinstance(error, Exception):
                with contextlib.suppress(RamifyError, Unsent, Lost, Busy):  # the first failure is the one to tell
                    await self.pause("abort")
            raise
        self.version = update.version
        if not paused:
            await self.resume()
        return time.perf_counter() - start

    async def _reset(self) -> None:
        """Empty the cache. The server answers 200 and `success: false` while a request holds on to a block."""
        deadline = time.monotonic() + RESET_DEADLINE
        while True:
            data = await exchange(self._http, "POST", "/reset_prefix_cache", reset_running_requests="true")
            if decode(data, dict, self.url).get("success"):
                return
            if time.monotonic() > deadline:
                said = f"its prefix cache could not be reset within {RESET_DEADLINE:g} s, requests hold blocks of it"
                raise DeadlineExceeded(f"{self.url} has new weights, but {said}")
            await asyncio.sleep(RESET_PAUSE)

    def _runs(self, spans: list[Span], count: int) -> tuple[VersionRun, ...]:
        ends = [0, *(span.end for span in spans)]
        if ends[-1] != count or any(span.start != end or span.end <= end for span, end in zip(spans, ends)):
            raise ProviderError(f"{self.url} answered {count} tokens whose versions do not add up: {spans}")
        return tuple(VersionRun(*self._named(span.version), span.end - span.start) for span in spans)

    def _named(self, label: str) -> Version:
        """The version a label stands for. Outside development mode nobody can change weights or label."""
        version = Version.read(label)
        if version is None and self._controlled:
            raise Unnamed(f"{self.url} sampled from weights labelled {label!r}, which is no version")
        return version or self.version

    def _check(self, ids: Sequence[int]) -> None:
        """Refuse what would stop the whole server: without a tokenizer, vLLM looks every id up unchecked."""
        if self._vocab is not None and len(ids) and not 0 <= min(ids) <= max(ids) < self._vocab:
            found = next(token for token in ids if not 0 <= token < self._vocab)
            raise RequestInvalid(f"the prompt holds token id {found}; the vocabulary is 0 to {self._vocab - 1}")


def _vocab(root: Path | None) -> int | None:
    try:
        return None if root is None else int(json.loads((root / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None
