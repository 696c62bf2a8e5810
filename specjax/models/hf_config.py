"""A Hugging Face ``config.json`` as a `LlamaConfig`, and back.

A key that is unknown and switched on is refused, not ignored: it may change the mathematics.
"""

import re
from typing import Any

from specjax.models import families
from specjax.models.config import LlamaConfig, Rope, RopeScaling
from specjax.models.families import FAMILIES, Family
from specjax.static import show

_SIZES = {  # ours: theirs; none of these has a default, a config without one is not a config
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_FLAGS = {"tie_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_READ = {
    *_SIZES.values(), *_FLAGS.values(), "architectures", "model_type", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "layer_types",
}
# Keys that select other mathematics, with the values that leave ours alone (None always does).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "residual_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "quantization_config": (),
}
# Keys that do not change the forward pass: bookkeeping, training, dropout, defaults of generation.
_HARMLESS = re.compile(
    r"_.*|transformers.*|unsloth.*|is_llama_config|name_or_path|torch_dtype|dtype|use_cache|pretraining_tp|"
    r"(attention|attn|hidden|embd|embedding|resid|residual|classifier)_?(dropout|pdrop)|dropout|initializer_range|"
    r"\w+_token_id|return_dict\w*|output_\w+|torchscript|use_bfloat16|tf_legacy_loss|pruned_heads|max_window_layers|"
    r"id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|tokenizer_class|prefix|"
    r"cross_attention_hidden_size|tie_encoder_decoder|chunk_size_feed_forward|max_length|min_length|max_new_tokens|"
    r"do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p|typical_p|"
    r"repetition_penalty|length_penalty|\w*no_repeat_ngram_size|num_return_sequences|bad_words_ids|suppress_tokens|"
    r"begin_suppress_tokens|exponential_decay_length_penalty|forced_\w+|remove_invalid_values|language|license|"
    r"router_aux_loss_coef|cache_implementation|attn_implementation|vocab_file"
)


def parse_config(settings: dict[str, Any], source: str = "config.json") -> LlamaConfig:
    """A ``config.json`` as a LlamaConfig.

    Raises:
      ValueError: naming the architecture, or the key and its value.
    """
    family = _family(settings, source)
    _refuse(settings, family, source)
    sizes = {ours: _whole(settings, theirs, source) for ours, theirs in _SIZES.items()}
    bos, pad = token_ids(settings, "bos_token_id", source), token_ids(settings, "pad_token_id", source, -1)
    flags: dict[str, Any] = {ours: _flag(settings, theirs, source) for ours, theirs in _FLAGS.items()}
    if family.tied and settings.get("tie_word_embeddings") is None:
        flags["tie_embeddings"] = True
    # Missing keys have the defaults of Transformers' LlamaConfig; where another family's differ, they must be there.
    try:
        return LlamaConfig(
            **sizes,
            num_kv_heads=_whole(settings, "num_key_value_heads", source, sizes["num_heads"]),
            head_dim=_whole(settings, "head_dim", source, 0),
            rms_eps=_positive(settings.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
            max_position_embeddings=_whole({"max_position_embeddings": 2048} | settings, "max_position_embeddings",
                                           source),
            bos_id=bos[0] if bos else None,
            eos_ids=token_ids(settings, "eos_token_id", source),
            pad_id=pad[0] if pad and pad[0] >= 0 else None,  # old files write "no padding" as -1
            windows=(windows := _windows(settings, family, sizes["num_layers"], source)),
            query_scalar=_optional(settings, "query_pre_attn_scalar", source),
            attention_softcap=_optional(settings, "attn_logit_softcapping", source),
            logit_softcap=_optional(settings, "final_logit_softcapping", source),
            **_ropes(settings, family, sizes["num_layers"], windows, source),
            **families.fields(family, sizes["hidden_size"]),
            **flags,
        )
    except ValueError as error:
        raise error if source in str(error) else ValueError(f"{source}: {error}") from None


def _family(settings: dict[str, Any], source: str) -> Family:
    """The family, on which architecture and model type must agree."""
    kind, architectures = settings.get("model_type", "llama"), settings.get("architectures")
    if architectures is not None and not (isinstance(architectures, list) and len(architectures) == 1):
        raise ValueError(f"{source}: architectures = {show(architectures)}: must be a list of one name")
    known = [family.architecture for family in FAMILIES]
    if architectures and architectures[0] not in known:
        supported = ", ".join(map(repr, known))
        raise ValueError(f"{source}: architecture {show(architectures[0])} is not supported; supported: {supported}")
    if not isinstance(kind, str) or kind not in families.BY_NAME:
        kinds = ", ".join(map(repr, families.BY_NAME))
        raise ValueError(f"{source}: model_type {show(kind)} is not supported; supported: {kinds}")
    family = families.BY_NAME[kind]
    if architectures and architectures[0] != family.architecture:
        raise ValueError(f"{source}: model_type {kind!r} and architecture {architectures[0]!r} contradict each other")
    nullable = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    for key in family.needs:
        if key not in settings or (settings[key] is None and key not in nullable):
            raise ValueError(f"{source}: {key} is missing, for which {kind} has another default than a Llama")
    return family


def _windows(settings: dict[str, Any], family: Family, num_layers: int, source: str) -> tuple[int, ...]:
    """The sliding window of each layer, by ``layer_types`` or by the family's habit."""
    types = settings.get("layer_types")
    if types is not None and not (isinstance(types, list) and len(types) == num_layers and all(
            kind in ("full_attention", "sliding_attention") for kind in types)):
        raise ValueError(f"{source}: layer_types = {show(types)}: must name full_attention or sliding_attention for "
                         f"each of {num_layers} layers")
    if "sliding_window" not in family.reads or settings.get("use_sliding_window", "qwen" not in family.name) is False:
        if types and "sliding_attention" in types:
            raise ValueError(f"{source}: layer_types = {types} contradicts use_sliding_window = "
                             f"{settings.get('use_sliding_window')!r}, or {family.name} has no such layers")
        return ()
    window = _whole(settings, "sliding_window", source, 0)
    if types is not None:
        if "sliding_attention" in types and not window:
            raise ValueError(f"{source}: layer_types = {types}, but sliding_window is missing")
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if "max_window_layers" in family.reads:
        full = _whole(settings, "max_window_layers", source)
        return tuple(window if index >= full else 0 for index in range(num_layers))
    named = {key: settings[key] for key in ("sliding_window_pattern", "_sliding_window_pattern")
             if key in family.reads and settings.get(key) is not None}
    for key, period in named.items():
        family = family._replace(period=_whole({key: period}, key, source))
    return families.windows(family, num_layers, window)


def _ropes(
    settings: dict[str, Any], family: Family, num_layers: int, windows: tuple[int, ...], source: str
) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, and ``ropes`` where layers differ."""
    if "no_rope_layers" in family.reads:
        rope = _rope(settings, source)
        has = settings.get("no_rope_layers")
        if has is None:
            interval = _whole(settings, "no_rope_layer_interval", source, family.no_rope)
            has = [int((index + 1) % interval != 0) for index in range(num_layers)]
        if not isinstance(has, list) or len(has) < num_layers or any(one not in (0, 1) for one in has):
            raise ValueError(f"{source}: no_rope_layers = {show(has)}: must be a list of 1 (rope) and 0 (none), one "
                             f"for each of {num_layers} layers")
        ropes = tuple(rope if one else None for one in has[:num_layers])
    elif "rope_local_base_freq" in family.reads:
        rope, local = _two_ropes(settings, source)
        ropes = tuple(local if window else rope for window in windows)
    else:
        rope, ropes = _rope(settings, source), ()
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling, "ropes": ropes}


def _two_ropes(settings: dict[str, Any], source: str) -> tuple[Rope, Rope]:
    """Of full and of sliding layers: two entries of ``rope_parameters``, or ``rope_local_base_freq`` (before)."""
    both = settings.get("rope_parameters")
    if isinstance(both, dict) and "full_attention" in both:
        if both.keys() != {"full_attention", "sliding_attention"}:
            raise ValueError(f"{source}: rope_parameters = {show(both)}: must have full_attention and "
                             "sliding_attention, nothing else")
        full, local = ({**settings, "rope_parameters": both[name], "rope_theta": None}
                       for name in ("full_attention", "sliding_attention"))
        return _rope(full, source), _rope(local, source)
    if settings.get("rope_theta") is None:
        raise ValueError(f"{source}: rope_theta is missing, for which Gemma 3 has another default than a Llama")
    local = settings.get("rope_local_base_freq")
    local = 10000.0 if local is None else local
    return _rope(settings, source), Rope(float(_positive(local, "rope_local_base_freq", source)))


def _whole(settings: dict[str, Any], key: str, source: str, default: int | None = None) -> int:
    """A positive whole number; ``default`` where the key is absent or null, if there is one."""
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if key not in settings or (value is None and key in _SIZES.values()):
        raise ValueError(f"{source}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{source}: {key} = {show(value)}: must be a whole number, 1 or more")
    return value


def _positive(value: Any, key: str, source: str) -> float:
    """A finite number over 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ValueError(f"{source}: {key} = {show(value)}: must be a finite number over 0")
    return value


def _optional(settings: dict[str, Any], key: str, source: str) -> float:
    """A finite number over 0, or 0 where it is absent or null."""
    value = settings.get(key)
    return 0.0 if value is None else float(_positive(value, key, source))


def _flag(settings: dict[str, Any], key: str, source: str) -> bool:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):  # bool("false") is True
        raise ValueError(f"{source}: {key} = {show(value)}: must be true or false")
    return bool(value)


def token_ids(settings: dict[str, Any], key: str, source: str, lowest: int = 0) -> tuple[int, ...]:
    """Token ids from null, a number or a list of numbers."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not lowest <= token < 2**31 for token in ids):
        raise ValueError(f"{source}: {key} = {show(value)}: must be a token id, a list of them, or null")
    return tuple(ids)


def _refuse(settings: dict[str, Any], family: Family, source: str) -> None:
    gelu = family.constants.get("activation") == "gelu_tanh"
    neutral = _NEUTRAL | ({"hidden_act": ("gelu_pytorch_tanh",)} if gelu else {})
    if gelu and settings.get("hidden_activation", "gelu_pytorch_tanh") not in (None, "gelu_pytorch_tanh"):
        raise ValueError(f"{source}: hidden_activation = {show(settings['hidden_activation'])} is not supported")
    for key, value in settings.items():
        if value is None or key in _READ or key in family.reads:
            continue
        if key in neutral:
            if value not in neutral[key]:
                raise ValueError(f"{source}: {key} = {value!r} is not supported")
        elif key == "sliding_window" and settings.get("use_sliding_window") is False:
            continue  # Qwen's spelling of "none"
        elif value and not _HARMLESS.fullmatch(key):
            raise ValueError(f"{source}: {key} = {value!r} is not supported: it is unknown and may change the model "
                             "(if it does not, delete it from the file)")


_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {  # needed, optional
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": ({"factor", "original_max_position_embeddings"},
             {"beta_fast", "beta_slow", "attention_factor", "truncate"}),
}


def _rope(settings: dict[str, Any], source: str) -> Rope:
    """Base and scaling from ``rope_parameters`` (Transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    new, old = settings.get("rope_parameters"), settings.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{source}: {name} = {show(value)}: must be an object, or null")
    if new and old and new != old:
        raise ValueError(f"{source}: rope_parameters = {new} and rope_scaling = {old} contradict each other")
    key = "rope_parameters" if new else "rope_scaling"
    rope = dict(new or old or {})
    outer, inner = settings.get("rope_theta"), rope.pop("rope_theta", None)
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(f"{source}: rope_theta is {outer} and, in {key}, {inner}")
    theta = inner if inner is not None else outer if outer is not None else 10000.0

    named = [rope.pop(name) for name in ("rope_type", "type") if name in rope]  # "type" is the oldest spelling
    if not all(isinstance(name, str) for name in named):
        raise ValueError(f"{source}: {key} has rope type {show(named[0])}: must be a string")
    kinds = set(named)
    if len(kinds) > 1:
        raise ValueError(f"{source}: {key} has two rope types, {' and '.join(sorted(map(repr, kinds)))}")
    kind = kinds.pop() if kinds else "default" if not rope else None
    if kind not in _ROPE_KEYS:
        supported = ", ".join(_ROPE_KEYS)
        raise ValueError(f"{source}: {key} has rope type {kind!r}, which is not supported; supported: {supported}")
    needed, optional = _ROPE_KEYS[kind]
    given = {name: value for name, value in rope.items() if value is not None}
    neutral = {"factor": 1.0, "partial_rotary_factor": 1.0, "attention_factor": 1.0}
    for name, value in given.items():
        if name not in needed | optional and neutral.get(name) != value:
            raise ValueError(f"{source}: {key}.{name} = {value!r} is not supported for rope type {kind!r}")
    if lacking := sorted(needed - given.keys()):
        raise ValueError(f"{source}: {key} of rope type {kind!r} lacks {', '.join(lacking)}")
    where = "rope_theta" if inner is None else f"{key}.rope_theta"
    values: dict[str, Any] = {name: _positive(given[name], f"{key}.{name}", source)
                              for name in (needed | optional - {"truncate"}) & given.keys()}
    if kind == "yarn":
        values["truncate"] = _flag({"truncate": True} | given, "truncate", source)
    try:
        return Rope(float(_positive(theta, where, source)), RopeScaling(kind=kind, **values))
    except ValueError as error:
        raise error if source in str(error) else ValueError(f"{source}: {error}") from None


def settings_of(config: LlamaConfig) -> dict[str, Any]:
    """The inverse of `parse_config`, for files that hold a configuration; special tokens are left out.

    Raises:
      ValueError: if no family has such a configuration.
    """
    family = families.family_of(config)
    settings = {
        "model_type": family.name, "architectures": [family.architecture], "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.rms_eps,
        "rope_parameters": _rope_settings(config.rope), "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings, "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }  # fmt: skip
    settings["hidden_activation" if "hidden_activation" in family.reads else "hidden_act"] = (
        "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else "silu"
    )
    if "sliding_window" in family.reads:
        settings["sliding_window"] = max(config.windows, default=0) or None
        settings["layer_types"] = [f"{'sliding' if kind.window else 'full'}_attention" for kind in config.layers]
    if "use_sliding_window" in family.reads:
        settings["use_sliding_window"] = bool(config.windows)
    if "query_pre_attn_scalar" in family.reads:
        settings |= {"query_pre_attn_scalar": config.query_scalar or float(config.head_dim),
                     "attn_logit_softcapping": config.attention_softcap or None,
                     "final_logit_softcapping": config.logit_softcap or None}
    if "rope_local_base_freq" in family.reads:
        local = next((kind.rope for kind in config.layers if kind.window and kind.rope), config.rope)
        settings["rope_parameters"] = {"full_attention": _rope_settings(config.rope),
                                       "sliding_attention": _rope_settings(local)}
    if "no_rope_layers" in family.reads:
        settings["no_rope_layers"] = [int(kind.rope is not None) for kind in config.layers]
    return settings


def _rope_settings(rope: Rope) -> dict[str, Any]:
    needed, optional = _ROPE_KEYS[rope.scaling.kind]
    values = {name: getattr(rope.scaling, name) for name in sorted(needed | optional)}
    if not values.get("attention_factor", 1.0):
        del values["attention_factor"]
    return {"rope_type": rope.scaling.kind, "rope_theta": rope.theta, **values}
