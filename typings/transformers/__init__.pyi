"""The names that Ramify imports from `transformers`, for pyright, which would otherwise read every model to find them.

Add what pyright reports as an unknown import symbol.
"""

from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.idefics3.configuration_idefics3 import Idefics3Config as Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import (
    Idefics3ForConditionalGeneration as Idefics3ForConditionalGeneration,
)
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
