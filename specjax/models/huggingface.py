"""Directories in the Hugging Face layout: config.json, safetensors, tokenizer.json, chat template."""

import json
import pathlib
import re
from typing import Any

import numpy as np

from specjax.models import chat
from specjax.models.config import LlamaConfig, RopeScaling

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
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(settings if eos is None else settings | {"eos_token_id": eos}, source=str(file))


# --- config.json -------------------------------------------------------------------------------------------------

_SIZES = {  # ours: theirs; none of these has a default, a config without one is not a config
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_READ = {
    *_SIZES.values(), "architectures", "model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "bos_token_id", "eos_token_id", "pad_token_id",
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
    _refuse(settings, source)
    sizes = {}
    for ours, theirs in _SIZES.items():
        if settings.get(theirs) is None:
            raise ValueError(f"{source}: {theirs} is missing")
        sizes[ours] = settings[theirs]
    theta, scaling = _rope(settings, source)
    eos = settings.get("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    bos = settings.get("bos_token_id")
    # Missing keys have the defaults of Transformers' LlamaConfig.
    return LlamaConfig(
        **sizes,
        num_kv_heads=settings.get("num_key_value_heads") or sizes["num_heads"],
        head_dim=settings.get("head_dim") or 0,
        rms_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
        attention_bias=bool(settings.get("attention_bias", False)),
        mlp_bias=bool(settings.get("mlp_bias", False)),
        bos_id=bos[0] if isinstance(bos, list) else bos,
        eos_ids=eos,
        pad_id=settings.get("pad_token_id"),
    )


def _refuse(settings: dict[str, Any], source: str) -> None:
    architectures = settings.get("architectures") or [settings.get("model_type")]
    if architectures[0] not in ("LlamaForCausalLM", "llama"):
        raise ValueError(f"{source}: architecture {architectures[0]!r} is not supported; supported: 'LlamaForCausalLM'")
    if settings.get("model_type", "llama") != "llama":
        raise ValueError(f"{source}: model_type {settings['model_type']!r} is not supported; supported: 'llama'")
    for key, value in settings.items():
        if value is None or key in _READ:
            continue
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise ValueError(f"{source}: {key} = {value!r} is not supported")
        elif key == "sliding_window" and settings.get("use_sliding_window") is False:
            continue  # Qwen's spelling of "none"
        elif key == "layer_types" and set(value) <= {"full_attention"}:
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
    if new and old and new != old:
        raise ValueError(f"{source}: rope_parameters = {new} and rope_scaling = {old} contradict each other")
    key = "rope_parameters" if new else "rope_scaling"
    rope = dict(new or old or {})
    outer, inner = settings.get("rope_theta"), rope.pop("rope_theta", None)
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(f"{source}: rope_theta is {outer} and, in {key}, {inner}")
    theta = inner if inner is not None else outer if outer is not None else 10000.0

    kinds = {rope.pop(name) for name in ("rope_type", "type") if name in rope}  # "type" is the oldest spelling
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
    return float(theta), RopeScaling(kind=kind, **{name: rope[name] for name in _ROPE_KEYS[kind]})


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
