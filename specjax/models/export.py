"""Checkpoints for others: a directory in the Hugging Face layout."""

import json
import pathlib
from typing import Any

import numpy as np

from specjax.models import directory, hf_config, llama_params
from specjax.models.config import LlamaConfig, check_ends
from specjax.models.language_model import LanguageModel, checked


def save_safetensors(path: str | pathlib.Path, lm: LanguageModel, *, overwrite: bool = False) -> None:
    """Writes a loaded model as config.json, model.safetensors and the tokenizer's files; `specjax.load` gives it back
    bit for bit, and other libraries of that layout read it.

    The weights are held once more in host memory while they are written. The directory appears whole or not at all.

    Raises:
      FileExistsError: if there is something at the path, unless ``overwrite`` and it is a checkpoint or empty.
      TypeError: if the model's configuration is not one of ours.
      ValueError: if no family has such a configuration, its weights are quantised, or it has num_tokens and no
        tokenizer; if an id that ends a text is outside the vocabulary; if path is no path or lm no language model.
    """
    from safetensors.numpy import save_file

    with directory.whole(path, overwrite) as folder:
        lm = checked("lm", lm)
        if not isinstance(lm.config, LlamaConfig):
            raise TypeError(f"only models with a LlamaConfig can be saved, not one with {type(lm.config).__name__}")
        check_ends(lm.eos_ids, lm.config.vocab_size, "lm")
        if lm.config.num_tokens and lm.tokenizer is None:
            raise ValueError(f"num_tokens={lm.config.num_tokens} without a tokenizer has no place in this layout: save "
                             "with specjax.models.save, which keeps it")  # fmt: skip
        if lm.config.quantization:
            raise ValueError(f"{lm.config.quantization} weights have no place in this layout: save them with "
                             "specjax.models.save, or load the model without quantize= first")
        params = llama_params.unstack_layers(lm.params) if 0 not in lm.params["layers"] else lm.params
        tensors = llama_params.spill(llama_params.sources(lm.config), params)
        settings = hf_config.settings_of(lm.config) | {
            "bos_token_id": lm.config.bos_id, "eos_token_id": list(lm.eos_ids), "pad_token_id": lm.config.pad_id,
            "dtype": str(np.asarray(tensors["model.norm.weight"]).dtype),
        }  # fmt: skip
        _write_json(folder / "config.json", settings)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if lm.tokenizer is not None:
            (folder / "tokenizer.json").write_text(lm.tokenizer.to_json(), encoding="utf-8")
            _write_json(folder / "tokenizer_config.json",
                        {"bos_token": lm.tokenizer.bos_token or None, "eos_token": lm.tokenizer.eos_token or None})
        if lm.chat_template is not None:
            (folder / "chat_template.jinja").write_text(lm.chat_template, encoding="utf-8")


def _write_json(file: pathlib.Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
