"""The other models of a run, as the orchestrator reaches them: their servers, and whether they can score.

A model whose tokenizer is another one, or which returns no logprobs of prompts, is refused before the first rollout.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ramify.core.async_calls import fail_after
from ramify.core.errors import EngineIncompatible, ProviderError, RamifyError, RequestInvalid
from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.client.generate_api import decode_json
from ramify.infer.client.http_client import HttpClient, RequestFailed, send_request
from ramify.infer.config import NamedModelConfig
from ramify.model.render.tokenizer import Tokenizer
from ramify.orchestrate.address_book import AddressBook, get_model_key

PROBE_TIMEOUT = 60.0  # seconds for a server to tokenize a text
PROBE_TEXT = "The 13 quick foxes jump.\n\tdef f(x): return {x: 'naïve', 2**10}  # <b>北京</b> 🙂 élan ©"


async def connect_model(
    name: str,
    config: NamedModelConfig,
    model_dir: Path,
    stack: AsyncExitStack,
    *,
    timeout: float,
    must_score: bool,
    top_k: int = 0,
    address_book: AddressBook | None = None,
) -> InferenceClient:
    """Connect to the servers of a model, and check that its tokens are those of the model in `model_dir`.

    With `must_score`, they must return logprobs of prompts too, and the `top_k` likeliest tokens of each position. The
    client follows the addresses in `address_book`. Raises ProviderError if no server answers within `timeout` seconds,
    or EngineIncompatible.
    """
    client = InferenceClient(config.base_url, ClientConfig(server_wait_timeout=timeout))
    if address_book is not None:
        address_book.subscribe(get_model_key(name), client.set_urls)
    try:
        await stack.enter_async_context(client)
        tokenizer = Tokenizer(model_dir)
        for url in client.joined_urls:
            await check_tokenizer(url, tokenizer)
        token_ids = tokenizer.encode(PROBE_TEXT).ids.tolist()
        if must_score and top_k:
            await client.score_top(token_ids, top_k, timeout=PROBE_TIMEOUT, start=1)
        elif must_score:
            await client.score(token_ids, timeout=PROBE_TIMEOUT, start=1)
    except RamifyError as error:
        raise type(error)(f"models.{name}: {error.message}") from error
    return client


async def check_tokenizer(url: str, tokenizer: Tokenizer) -> None:
    """Raise EngineIncompatible unless a server tokenizes as `tokenizer` does: a text, and every added token."""
    for text in (PROBE_TEXT, "".join(tokenizer.added_tokens)):
        expected, actual = tokenizer.encode(text).ids.tolist(), await _tokenize(url, text)
        if actual != expected:
            difference = next((i for i, pair in enumerate(zip(actual, expected)) if pair[0] != pair[1]), len(actual))
            raise EngineIncompatible(
                f"{url} has another tokenizer than {tokenizer.name}: they tokenize {text[:24]!r}... differently from "
                f"token {difference} on; use a model with the policy's tokenizer"
            )


async def _tokenize(url: str, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    try:
        async with (
            fail_after(PROBE_TIMEOUT, f"{url}/tokenize"),
            HttpClient(url, connect_timeout=PROBE_TIMEOUT, max_connections=1) as http,
        ):
            reply = decode_json(await send_request(http, "POST", "/tokenize", body), dict[str, Any], url)
            return [int(token_id) for token_id in reply["tokens"]]
    except RequestFailed as error:
        raise ProviderError(str(error)) from error
    except (ProviderError, RequestInvalid, KeyError, TypeError, ValueError) as error:
        raise EngineIncompatible(
            f"{url} does not tokenize a text, so tokenizers cannot be compared: {error}"
        ) from error
