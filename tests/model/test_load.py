"""What the engine cannot hold is refused by name, before anything is loaded."""

import pytest
from transformers import AutoConfig, LlamaConfig

from ramify.errors import ModelUnsupported
from ramify.model.load import load


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gemma4", "head_dim"),
        ("gemma4_text", "head_dim"),
        ("deepseek_v3", "latent"),
        ("mamba2", "mamba"),
        ("bloom", "max_position_embeddings"),
    ],
)
def test_a_model_without_a_paged_cache_is_named(kind, named, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match=named):
        load(tmp_path)


def test_layers_share_one_number_of_keys_and_values(tmp_path):
    LlamaConfig(per_layer_config={1: {"num_key_value_heads": 8}}).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="num_key_value_heads"):
        load(tmp_path)
