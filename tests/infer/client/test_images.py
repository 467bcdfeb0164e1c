"""Images that a server drops before they are used."""

import numpy as np
import pytest

from ramify.core.errors import ImageMissing, RequestInvalid
from ramify.infer.client import ClientSampling
from ramify.infer.client.generate_messages import RequestImage
from ramify.model.images import ProcessedImage
from tests.infer.client.test_replica_pool import connected
from tests.support.engine import Exchange, ScriptedEngine


class ForgetfulServer(ScriptedEngine):
    """A server that drops every image at once."""

    def __init__(self, cache_bytes: int) -> None:
        super().__init__()
        self.cache_bytes = cache_bytes

    async def store_image(self, exchange: Exchange) -> None:
        await exchange.reply({"cache_bytes": self.cache_bytes})


@pytest.mark.parametrize(
    ("cache_bytes", "failure", "message"),
    [
        (1000, RequestInvalid, r"2 images of the prompt have \d{4} bytes, .* keeps 1000.*inference.image_cache_mib"),
        (1 << 20, ImageMissing, "upload them first"),
    ],
)
async def test_a_prompt_larger_than_the_cache_is_refused_with_both_sizes(cache_bytes, failure, message):
    image = ProcessedImage("a", "idefics3", {"pixel_values": np.zeros((1, 1, 3, 8, 8), np.float32)}, (1, 1), 1)

    async def load() -> ProcessedImage:
        return image

    images = [RequestImage(hash, n, n + 1, load) for n, hash in enumerate("ab")]

    async with connected(ForgetfulServer(cache_bytes)) as client:
        with pytest.raises(failure, match=message):
            await client.generate([1, 2, 3], ClientSampling(max_tokens=1), images=images)
