"""Directories in the Hugging Face layout: config.json, safetensors, tokenizer.json, chat template."""

import json
import pathlib
import re
from typing import Any

import numpy as np

from specjax.models import chat
from specjax.models.config import LlamaConfig, RopeScaling
from specjax.static import show

HUB_FILES = [  # what `load` reads, and nothing else is downloaded
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", "model.safetensors", "model-*.safetensors",
]


class SafetensorsFiles:
    """The tensors of a directory, in one or many files: ``shapes`` from the headers, ``read`` one at a time.

    Raises:
      FileNotFoundError: if there is no safetensors file, or listing those that the index names and that are missing.
      ValueError: naming the file that is truncated or not safetensors, a tensor found twice, or one that the index
        promises and no file has.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        index = path / "model.safetensors.index.json"
        promised: dict[str, str] = read_json(index).get("weight_map", {}) if index.exists() else {}
        names = sorted(set(promised.values())) if index.exists() else ["model.safetensors"]
        missing = [name for name in names if not (path / name).exists()]
        if missing and not index.exists():
            other = " (only PyTorch files are there; convert them to safetensors)" if [*path.glob("*.bin")] else ""
            raise FileNotFoundError(f"{path} has neither model.safetensors nor model.safetensors.index.json{other}")
        if missing:
            raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
        self._where: dict[str, Any] = {}  # tensor -> open file
        self._file_of: dict[str, pathlib.Path] = {}
        for name in names:
            self._open(path / name)
        if lost := [name for name in promised if name not in self._where]:
            raise ValueError(f"{index} names tensors that no file has: {', '.join(lost)}")
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}

    def _open(self, file: pathlib.Path) -> None:
        import safetensors

        try:
            opened = safetensors.safe_open(str(file), framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in self._where:
                raise ValueError(f"tensor {name!r} is in {self._file_of[name].name} and in {file.name} of {self.path}")
            self._where[name], self._file_of[name] = opened, file

    def read(self, name: str) -> np.ndarray:
        """One tensor, bit for bit as stored (bfloat16 as ml_dtypes.bfloat16).

        Raises:
          ValueError: naming a tensor whose type numpy cannot hold.
        """
        try:
            return self._where[name].get_tensor(name)
        except (AttributeError, TypeError, KeyError) as error:  # what safetensors raises for 8-bit floats
            kind = self._where[name].get_slice(name).get_dtype()
            raise ValueError(f"{self._file_of[name]}: tensor {name!r} has the unsupported type {kind}") from error


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file if it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def chat_template_of(path: pathlib.Path) -> str | None:
    """``chat_template.jinja`` if there is one, else the one in ``tokenizer_config.json``, else None."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    settings = path / "tokenizer_config.json"
    return chat.pick(read_json(settings).get("chat_template"), str(settings)) if settings.exists() else None


def config_of_directory(path: pathlib.Path) -> LlamaConfig:
    """The configuration, with the end tokens of ``generation_config.json`` where it has any."""
    file = path / "config.json"
    settings = read_json(file)
    generation = path / "generation_config.json"
    defaults = read_json(generation) if generation.exists() else {}
    eos = list(_ids(defaults, "eos_token_id", str(generation)))
    given = defaults.get("eos_token_id") is not None
    return parse_config(settings | {"eos_token_id": eos} if given else settings, source=str(file))


# --- config.json -------------------------------------------------------------------------------------------------

_SIZES = {  # ours: theirs; none of these has a default, a config without one is not a config
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_SUPPORTED = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FLAGS = {"tie_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_READ = {
    *_SIZES.values(), *_FLAGS.values(), "architectures", "model_type", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
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

    Keys that are unknown and switched on are refused, not ignored: one of them may change the mathematics.

    Raises:
      ValueError: naming the architecture, or the key and its value.
    """
    family = _family(settings, source)
    _refuse(settings, source)
    sizes = {ours: _whole(settings, theirs, source) for ours, theirs in _SIZES.items()}
    theta, scaling = _rope(settings, source)
    bos, pad = _ids(settings, "bos_token_id", source), _ids(settings, "pad_token_id", source, -1)
    flags = {ours: _flag(settings, theirs, source) for ours, theirs in _FLAGS.items()}
    # Missing keys have the defaults of Transformers' LlamaConfig.
    try:
        return LlamaConfig(
            **sizes,
            num_kv_heads=_whole(settings, "num_key_value_heads", source, sizes["num_heads"]),
            head_dim=_whole(settings, "head_dim", source, 0),
            rms_eps=_positive(settings.get("rms_norm_eps", 1e-6), "rms_norm_eps", source),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_whole({"max_position_embeddings": 2048} | settings, "max_position_embeddings",
                                           source),
            bos_id=bos[0] if bos else None,
            eos_ids=_ids(settings, "eos_token_id", source),
            pad_id=pad[0] if pad and pad[0] >= 0 else None,  # old files write "no padding" as -1
            qk_norm=family == "qwen3",
            **flags,
        )
    except ValueError as error:
        raise error if source in str(error) else ValueError(f"{source}: {error}") from None


def _family(settings: dict[str, Any], source: str) -> str:
    """The model type, one of `_SUPPORTED`, which architecture and model type must agree on."""
    kind, architectures = settings.get("model_type", "llama"), settings.get("architectures")
    if architectures is not None and not (isinstance(architectures, list) and len(architectures) == 1):
        raise ValueError(f"{source}: architectures = {show(architectures)}: must be a list of one name")
    supported = ", ".join(map(repr, _SUPPORTED.values()))
    if architectures and architectures[0] not in _SUPPORTED.values():
        raise ValueError(f"{source}: architecture {show(architectures[0])} is not supported; supported: {supported}")
    if not isinstance(kind, str) or kind not in _SUPPORTED:
        kinds = ", ".join(map(repr, _SUPPORTED))
        raise ValueError(f"{source}: model_type {show(kind)} is not supported; supported: {kinds}")
    if architectures and architectures[0] != _SUPPORTED[kind]:
        raise ValueError(f"{source}: model_type {kind!r} and architecture {architectures[0]!r} contradict each other")
    if kind == "qwen3" and None in (settings.get("head_dim"), settings.get("num_key_value_heads")):
        raise ValueError(f"{source}: head_dim or num_key_value_heads is missing, for which Qwen 3 has other defaults")
    return kind


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


def _flag(settings: dict[str, Any], key: str, source: str) -> bool:
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):  # bool("false") is True
        raise ValueError(f"{source}: {key} = {show(value)}: must be true or false")
    return bool(value)


def _ids(settings: dict[str, Any], key: str, source: str, lowest: int = 0) -> tuple[int, ...]:
    """Token ids from null, a number or a list of numbers."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not lowest <= token < 2**31 for token in ids):
        raise ValueError(f"{source}: {key} = {show(value)}: must be a token id, a list of them, or null")
    return tuple(ids)


def _refuse(settings: dict[str, Any], source: str) -> None:
    for key, value in settings.items():
        if value is None or key in _READ:
            continue
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise ValueError(f"{source}: {key} = {value!r} is not supported")
        elif key == "sliding_window" and settings.get("use_sliding_window") is False:
            continue  # Qwen's spelling of "none"
        elif key == "layer_types" and isinstance(value, list) and all(item == "full_attention" for item in value):
            continue
        elif value and not _HARMLESS.fullmatch(key):
            raise ValueError(f"{source}: {key} = {value!r} is not supported: it is unknown and may change the model "
                             "(if it does not, delete it from the file)")


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _rope(settings: dict[str, Any], source: str) -> tuple[float, RopeScaling]:
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
    neutral = {"factor": 1.0, "partial_rotary_factor": 1.0, "attention_factor": 1.0}
    for name, value in rope.items():
        if name not in _ROPE_KEYS[kind] and value is not None and neutral.get(name) != value:
            raise ValueError(f"{source}: {key}.{name} = {value!r} is not supported for rope type {kind!r}")
    if lacking := sorted(_ROPE_KEYS[kind] - {name for name, value in rope.items() if value is not None}):
        raise ValueError(f"{source}: {key} of rope type {kind!r} lacks {', '.join(lacking)}")
    where = "rope_theta" if inner is None else f"{key}.rope_theta"
    numbers: dict[str, Any] = {name: _positive(rope[name], f"{key}.{name}", source) for name in _ROPE_KEYS[kind]}
    try:
        return float(_positive(theta, where, source)), RopeScaling(kind=kind, **numbers)
    except ValueError as error:
        raise error if source in str(error) else ValueError(f"{source}: {error}") from None


def settings_of(config: LlamaConfig) -> dict[str, Any]:
    """The inverse of `parse_config`, for files that hold a configuration; special tokens are left out."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": config.rope_theta}
    if scaling.kind != "default":
        rope["factor"] = scaling.factor
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                 "original_max_position_embeddings": scaling.original_max_position_embeddings}
    family = ("qwen3", "Qwen3ForCausalLM") if config.qk_norm else ("llama", "LlamaForCausalLM")
    return {
        "model_type": family[0], "architectures": [family[1]], "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.rms_eps,
        "rope_parameters": rope, "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings, "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias, "hidden_act": "silu",
    }  # fmt: skip


# --- the hub -----------------------------------------------------------------------------------------------------


def download(repository: str) -> pathlib.Path:
    """Local directory of a hub repository ("org/name"), with the files `load` reads.

    Raises:
      ImportError: if ``huggingface_hub`` is not installed, saying how to install it.
      OSError: if the download fails.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(
            f"no file or directory {repository!r}; to load it from the hub, `pip install huggingface_hub`"
        ) from None
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:
        raise OSError(f"no file or directory {repository!r}, and fetching it from the hub failed: {error}") from error
