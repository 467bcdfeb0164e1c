"""Tree attention by itself: the mask, its blocks, its memory, and the models it is refused to."""

import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig

from ramify.errors import ModelUnsupported
from ramify.model.cpu.tree_attention import CpuTreeAttention, split_attention
from ramify.model.cuda import reference
from ramify.model.cuda.causal_attention import LENGTH_MULTIPLE, MIN_CHAIN_TOKENS, ChainLengths, causal_attention
from ramify.model.pack_layout import PackLayout, choose_pack_layout
from ramify.model.tree_attention import BLOCK_SIZE, BlockMask, block_sparse_attention
from ramify.trace import Forest, build_forest, concat_forests, make_padding_forest, pack_trees, split_forest
from tests.trace.forests import Size, group
from tests.train.models import CONFIGS, HYBRID

SEEDS = range(10 if os.environ.get("RAMIFY_FULL") else 1)
SIZE = Size(traces=4, nodes=8, fewest=5, tokens=70, vocab=3, logprobs=(-5.0, -0.1))


def row(seed: int) -> Forest:
    """Bushy trees with long and short runs, some cut, with padding behind, a multiple of the block long."""
    rng = Random(seed)
    forests = [build_forest([each.sample() for each in group(rng, SIZE, f"g{number}-")]) for number in range(3)]
    whole = concat_forests(pack_trees([piece for forest in forests for piece in split_forest(forest, 400)], 10_000))
    return concat_forests([whole, make_padding_forest(-len(whole) % BLOCK_SIZE)])


def seen(forest: Forest, window: int) -> torch.Tensor:
    near = forest.position_ids[:, None] - forest.position_ids[None, :] < (window or len(forest))
    return torch.from_numpy(forest.build_attention_mask() & near)


@pytest.mark.parametrize("window", [0, 5, 40, 300])
@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_attend_to_what_the_rule_says_forward_and_backward(seed, window):
    forest = row(seed)
    torch.manual_seed(seed)
    query = torch.randn(1, 4, len(forest), 8, requires_grad=True)
    key, value = (torch.randn(1, 2, len(forest), 8, requires_grad=True) for _ in range(2))
    end, position = torch.from_numpy(forest.subtree_end), torch.from_numpy(forest.position_ids)
    wanted = reference.tree_attention(query, key, value, end, position, window=window)
    grad = torch.randn_like(wanted)
    plan = split_attention(forest.subtree_end, forest.position_ids, window)
    assert any(product.mask is not None for product in plan)
    assert window or any(product.causal for product in plan)
    found = CpuTreeAttention.apply(query, key, value, plan, None)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(each, (query, key, value), grad) for each in (found, wanted))
    for mine, other in zip(ours, theirs):
        assert (mine - other).norm() <= 2e-6 * other.norm()


def listed(lists: torch.Tensor) -> dict[int, tuple[set[int], set[int]]]:
    """Of each block those it sees wholly, and those it sees in part."""
    found = {}
    for block, wholly, in_all, *which in lists.tolist():
        found[block] = (set(which[:wholly]), set(which[wholly:in_all]))
    return found


@pytest.mark.parametrize("window", [0, 40])
def test_blocks_hold_what_the_rule_says_and_leave_the_rest_out(window):
    forest = row(1)
    blocks = BlockMask.build(forest.subtree_end, forest.position_ids, window, torch.device("cpu"))
    tiled = seen(forest, window).reshape(len(forest) // BLOCK_SIZE, BLOCK_SIZE, len(forest) // BLOCK_SIZE, BLOCK_SIZE)
    some, every = tiled.any(3).any(1), tiled.all(3).all(1)
    keys, queries = listed(blocks.kv_lists), listed(blocks.q_lists)
    assert sorted(keys) == sorted(queries) == list(range(len(some)))
    for number, (wholly, partly) in keys.items():
        assert wholly <= set(np.flatnonzero(every[number]).tolist())
        assert set(np.flatnonzero(some[number]).tolist()) <= wholly | partly
        assert not wholly & partly
    if not window:  # without a window no block is computed for nothing
        assert sum(len(wholly | partly) for wholly, partly in keys.values()) == int(some.sum())
    for side in (0, 1):  # both kinds of lists say the same
        pairs = {(query, key) for query, lists in keys.items() for key in lists[side]}
        assert pairs == {(query, key) for key, lists in queries.items() for query in lists[side]}


def test_very_long_lists_come_first_and_the_others_stay_in_order():
    prompt, reply, replies = BLOCK_SIZE, 8 * BLOCK_SIZE, 8
    end = np.concatenate([np.full(prompt, prompt + replies * reply), prompt + ends(*[reply] * replies)])
    blocks = BlockMask.build(end, np.arange(len(end), dtype=np.int32), 0, torch.device("cpu"))
    assert blocks.q_lists[:, 0].tolist() == list(range(len(end) // BLOCK_SIZE)) == blocks.kv_lists[:, 0].tolist()
    moved = np.concatenate([ends(reply), end + reply])
    blocks = BlockMask.build(moved, np.arange(len(moved), dtype=np.int32), 0, torch.device("cpu"))
    assert blocks.q_lists[:, 0].tolist() == [8, *range(8), *range(9, len(moved) // BLOCK_SIZE)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize(("width", "window"), [(64, 40), (128, 0), (80, 0), (80, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_attend_to_what_the_rule_says_forward_and_backward(dtype, width, window):
    if dtype is torch.float32 and width == 80:
        pytest.skip("kernels for float32 take long to compile")
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    forest = row(1)
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    shapes = [(1, heads, len(forest), width) for heads in (4, 2, 2, 4)]
    query, key, value, grad = (torch.randn(shape, device=cuda, dtype=dtype).requires_grad_() for shape in shapes)
    blocks = BlockMask.build(forest.subtree_end, forest.position_ids, window, cuda)
    found = block_sparse_attention(query, key, value, blocks, None, window).transpose(1, 2)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    end, position = torch.from_numpy(forest.subtree_end).to(cuda), torch.from_numpy(forest.position_ids).to(cuda)
    wanted = reference.tree_attention(*exact, end, position, window=window)
    assert (found - wanted).norm() <= limit * wanted.norm()
    ours = torch.autograd.grad(found, (query, key, value), grad)
    theirs = torch.autograd.grad(wanted, exact, grad.double())
    for mine, other in zip(ours, theirs):
        assert (mine - other).norm() <= limit * other.norm()


def ends(*lengths: int) -> np.ndarray:
    """Of chains side by side."""
    return np.repeat(np.cumsum(lengths), lengths)


def test_a_row_of_long_chains_is_known_by_its_ends():
    def lengths(end: np.ndarray) -> list[int] | None:
        found = ChainLengths.from_ends(end)
        return found and found.lengths

    padding = make_padding_forest(300).subtree_end
    assert lengths(ends(MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS + 7)) == [MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS + 7]
    assert lengths(np.concatenate([ends(MIN_CHAIN_TOKENS), padding + MIN_CHAIN_TOKENS])) == [MIN_CHAIN_TOKENS]
    assert lengths(ends(MIN_CHAIN_TOKENS, 5, MIN_CHAIN_TOKENS)) is None
    assert lengths(padding) is None
    forked = ends(MIN_CHAIN_TOKENS, MIN_CHAIN_TOKENS)
    forked[: MIN_CHAIN_TOKENS // 2] = 2 * MIN_CHAIN_TOKENS  # the second chain hangs from the middle of the first
    assert lengths(forked) is None


def test_chains_attend_each_by_itself_and_padding_to_nothing():
    lengths, rest = [LENGTH_MULTIPLE, 100, 70], 30
    torch.manual_seed(0)
    query = torch.randn(1, 4, sum(lengths) + rest, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, sum(lengths) + rest, 8, requires_grad=True) for _ in range(2))
    found = causal_attention(query, key, value, ChainLengths(lengths), None)
    assert not found[:, :, -rest:].any()
    end = ends(*lengths, *[1] * rest)
    wanted = CpuTreeAttention.apply(query, key, value, split_attention(end, end, 0), None)
    grad = torch.randn_like(wanted)
    grad[:, :, -rest:] = 0.0  # nothing is trained there
    torch.testing.assert_close(found[:, :, :-rest], wanted[:, :, :-rest], atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(each, (query, key, value), grad) for each in (found, wanted))
    for mine, other in zip(ours, theirs):
        assert (mine - other).norm() <= 2e-6 * other.norm()


BIG = """
import resource
import numpy as np, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from ramify.model.pack_layout import PackLayout
from ramify.model.tree_attention import ATTENTION_NAME
from ramify.trace import AnnotatedTrace, Annotation, Message, Trace, build_forest
from ramify.train.losses import load_loss
from ramify.train.policy import PolicyModel
from ramify.train.model_inputs import build_model_inputs

torch.set_num_threads(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
policy = PolicyModel(model, PackLayout.FOREST, load_loss("dppo"))

def run(attempts):
    rng, samples = np.random.default_rng(0), []
    prompt = rng.integers(0, 64, 2500)
    for number in range(attempts):
        trace = Trace(id=str(number))
        trace.add_node(-1, Message("user"), prompt)
        for parent in (0, 1, 1):  # a reply, and two ways to go on
            size = 25 if parent else 500
            ids, logprobs = rng.integers(0, 64, size), [-4.0] * size
            trace.add_node(parent, Message("assistant"), ids, sampled_span=(0, size), logprobs=logprobs)
        samples.append(AnnotatedTrace(trace, tuple(Annotation(trace.id, node, advantage=1.0) for node in (1, 2, 3))))
    forest = build_forest(samples)
    policy(build_model_inputs(forest), forest.count_by_component()).loss.backward()
    return len(forest)

run(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = run(50)
print(tokens, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_tree_of_30000_tokens_takes_memory_linear_in_its_tokens():
    """A mask of its pairs would take 900 MB as bytes, 3.6 GB as numbers; a tensor of its activations takes 4 MB."""
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    tokens, grown = map(int, done.stdout.split())
    assert tokens >= 29_000
    assert grown < 300e6


def test_layouts():
    assert {choose_pack_layout(config) for config in CONFIGS.values()} == {PackLayout.FOREST}
    assert choose_pack_layout(HYBRID) is PackLayout.CHAINS
    for kind in ("mamba", "qwen3_next", "falcon_h1", "bamba", "rwkv"):
        assert choose_pack_layout(AutoConfig.for_model(kind)) is PackLayout.CHAINS, kind


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gpt_oss", "sinks"),
        ("deepseek_v3", "kv_lora_rank"),
        ("cohere", "logit_scale"),
        ("recurrent_gemma", "logits_soft_cap"),
        ("xlstm", "output_logit_soft_cap"),
        ("inkling_text", "logits_mup_width_multiplier"),
        ("codegen", "by itself"),
        ("gptj", "by itself"),
        ("xglm", "by itself"),
        ("clip_text_model", "no causal language model"),
        ("llama4_text", "chunked_attention"),
        ("gemma4_text", "head_dim"),
        ("gemma4", "head_dim"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(kind, named):
    with pytest.raises(ModelUnsupported, match=named):
        choose_pack_layout(AutoConfig.for_model(kind))


def test_layers_may_differ_in_what_the_trainer_takes_from_the_weights():
    assert choose_pack_layout(LlamaConfig(per_layer_config={1: {"intermediate_size": 64}})) is PackLayout.FOREST
    with pytest.raises(ModelUnsupported, match="sliding_window"):
        choose_pack_layout(MistralConfig(sliding_window=9, per_layer_config={1: {"sliding_window": 5}}))


def test_a_scale_of_one_is_no_scale():
    config = LlamaConfig()
    config.logits_scaling = 1.0
    assert choose_pack_layout(config) is PackLayout.FOREST
