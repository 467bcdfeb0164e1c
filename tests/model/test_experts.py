"""A mixture of experts is recognized by its config, as saved or as loaded."""

import pytest
from transformers import AutoConfig

from ramify.model.experts import describe_experts, read_expert_counts


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [("qwen3_moe", "num_experts"), ("mixtral", "num_local_experts"), ("deepseek_v3", "n_routed_experts")],
)
def test_experts_are_counted(model_type, setting):
    config = AutoConfig.for_model(model_type)
    assert read_expert_counts(config.to_dict()) == (getattr(config, setting), config.num_experts_per_tok)


def test_note_points_to_the_mismatch():
    note = describe_experts({"text_config": {"num_experts": 8, "num_experts_per_tok": 2}})
    assert note is not None
    assert note.startswith("experts: 2 of 8 process a token; router replay is not implemented")
    assert "mismatch_kl" in note


@pytest.mark.parametrize("config", [{}, {"num_experts": 0}, {"num_local_experts": 1}])
def test_model_without_experts_has_no_note(config):
    assert describe_experts(config) is None
