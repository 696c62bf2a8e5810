"""The families of decoders, as what sets them apart from a Llama.

All run on the blocks of `specjax.models.llama`; what differs stands in `LlamaConfig` and is filled in from here by the
readers of config.json (`specjax.models.hf_config`) and of GGUF metadata (`specjax.models.gguf_config`).

    Llama 2, 3, 3.x   the plain blocks
    Mistral           a sliding window in every layer, or none (Jiang et al., arXiv 2310.06825, 2023)
    Qwen 2, 2.5       a bias of queries, keys and values
    Qwen 3            norms of queries and keys
    Gemma 2           norms before and after, 1 + w, scaled embeddings, soft caps, windows in every second layer
                      (Gemma Team, arXiv 2408.00118, 2024)
    Gemma 3 (text)    the same without soft caps, norms of queries and keys, windows in five layers of six, which have a
                      rope base of their own (Gemma Team, arXiv 2503.19786, 2025)
    SmolLM3           no rope in every fourth layer
    OLMo 2            norms after only, one norm over all heads' queries and one over all keys (OLMo Team,
                      arXiv 2501.00656, 2025)
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.models.config import LlamaConfig


class Family(NamedTuple):
    """One family; ``name``, ``architecture``: ``model_type`` and ``architectures`` of config.json."""

    name: str
    architecture: str
    gguf: str = ""  # general.architecture; "": files of it call themselves llama
    constants: Mapping[str, Any] = {}  # fields of LlamaConfig that all its models share
    scales_embedding: bool = False  # by sqrt(hidden_size)
    period: int = 0  # every period-th layer sees all tokens, the others have a window; 0: as the checkpoint says
    no_rope: int = 0  # every no_rope-th layer has no rope
    permuted: bool = False  # llama.cpp's converter interleaves the two halves of every q and k head
    tied: bool = False  # what Transformers takes where config.json does not say whether the embeddings are tied
    reads: tuple[str, ...] = ()  # keys of config.json that only this family has
    needs: tuple[str, ...] = ()  # keys of config.json for which Transformers has other defaults than for a Llama


_WINDOWS = ("sliding_window", "layer_types")
_GEMMA = {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh"}
_GEMMA_READS = (*_WINDOWS, "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping",
                "final_logit_softcapping")
_SIZES = ("num_key_value_heads", "max_position_embeddings")
_GEMMA_NEEDS = (*_SIZES, "head_dim", "sliding_window", "query_pre_attn_scalar")

FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama", permuted=True),
    Family("mistral", "MistralForCausalLM", reads=_WINDOWS, needs=(*_SIZES, "sliding_window")),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", {"qkv_bias": True},
           reads=(*_WINDOWS, "use_sliding_window", "max_window_layers"), needs=_SIZES),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", {"qk_norm": True},
           reads=(*_WINDOWS, "use_sliding_window", "max_window_layers"), needs=("num_key_value_heads", "head_dim")),
    Family("gemma2", "Gemma2ForCausalLM", "gemma2", _GEMMA, scales_embedding=True, period=2, tied=True,
           reads=_GEMMA_READS, needs=(*_GEMMA_NEEDS, "attn_logit_softcapping", "final_logit_softcapping")),
    Family("gemma3_text", "Gemma3ForCausalLM", "gemma3", {**_GEMMA, "qk_norm": True}, scales_embedding=True, period=6,
           tied=True, needs=_GEMMA_NEEDS,
           reads=(*_GEMMA_READS, "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern")),
    Family("smollm3", "SmolLM3ForCausalLM", "smollm3", no_rope=4, permuted=True, tied=True, needs=_SIZES,
           reads=("layer_types", "no_rope_layers", "no_rope_layer_interval")),
    Family("olmo2", "Olmo2ForCausalLM", "olmo2", {"norms": "after", "wide_qk_norm": True},
           needs=(*_SIZES, "rms_norm_eps")),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf}


def fields(family: Family, hidden_size: int) -> dict[str, Any]:
    """What all models of the family have in their configuration."""
    scale = {"embedding_scale": math.sqrt(hidden_size)} if family.scales_embedding else {}
    return {**family.constants, **scale}


def windows(family: Family, num_layers: int, window: int) -> tuple[int, ...]:
    """The window of each layer by the family's period: the last layer of each period sees everything."""
    period = family.period
    return tuple(0 if period and (index + 1) % period == 0 else window for index in range(num_layers))


def family_of(config: LlamaConfig) -> Family:
    """The family whose files can hold this configuration.

    Raises:
      ValueError: if there is none.
    """
    if config.norms == "both":
        name = "gemma3_text" if config.qk_norm else "gemma2"
    elif config.norms == "after":
        name = "olmo2"
    elif None in config.ropes:
        name = "smollm3"
    elif config.qk_norm or config.qkv_bias:
        name = "qwen3" if config.qk_norm else "qwen2"
    else:
        name = "mistral" if config.windows else "llama"
    family = BY_NAME[name]
    shared: dict[str, Any] = {"qkv_bias": False, "qk_norm": False, "wide_qk_norm": False, "norm_offset": 0.0,
                              "activation": "silu", "embedding_scale": 1.0}  # fmt: skip
    for field, value in {**shared, **fields(family, config.hidden_size)}.items():
        if getattr(config, field) != value:
            raise ValueError(f"no family has {field} = {getattr(config, field)!r} beside the rest of {config}")
    return family
