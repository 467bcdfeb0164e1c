"""The types of layers, as a model's config names them in `layer_types`. Importable without torch."""

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # keep keys and values of every token
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv"})  # keep a state of fixed size
