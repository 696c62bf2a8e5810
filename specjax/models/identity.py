"""Which model this is, so that what was made for one is not used with another."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processes
from specjax.models.config import LlamaConfig
from specjax.models.language_model import LanguageModel
from specjax.models.llama_params import side_by_side

TURNED = ("embedding", "head", "qkv", "o", "gate_up", "down")  # frozen, like all that makes a name


def fingerprint(target: LanguageModel) -> str:
    """Which target this is: a hash of its configuration, some of its weights and the size of its vocabulary.

    The same for float32 and bfloat16 weights of one checkpoint.
    """
    digest, config = hashlib.sha256(), target.config
    words = target.tokenizer
    facts: dict[str, Any] = {"vocab_size": target.model.vocab_size}
    facts["tokenizer"] = None if words is None else getattr(words, "vocab_size", None)
    if dataclasses.is_dataclass(target.config):  # a field at its default says nothing, and may be new in this version
        for field in dataclasses.fields(target.config):
            value = getattr(target.config, field.name)
            if value != field.default:
                facts[field.name] = repr(value)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        # Of [in, out] with the tensors side by side, as they once stood: whatever the order in memory, the name stays.
        name, shape = str(getattr(path[-1], "key", "")), np.shape(leaf)
        turned = isinstance(config, LlamaConfig) and name in TURNED
        shape = (*shape[:-2], *shape[-2:][::-1]) if turned else shape
        digest.update(f"{jax.tree_util.keystr(path)} {shape}".encode())
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
            places = np.linspace(0, leaf.size - 1, num=min(64, leaf.size)).astype(np.int64)
            index = np.unravel_index(places, shape)
            order = side_by_side(config, name) if isinstance(config, LlamaConfig) else None
            index = index if order is None else (*index[:-1], order[index[-1]])
            index = (*index[:-2], *index[-2:][::-1]) if turned else index
            some = np.asarray(processes.fetch(leaf[index])).astype(np.float32)
            digest.update(np.asarray(jnp.asarray(some).astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()


def equal(weight: Any, copy: np.ndarray) -> bool:
    """Whether a copy is a weight of the target, bit for bit and on every device: no process decides by the parts that
    it holds. Every process must come here, with the same copy."""
    return np.shape(weight) == copy.shape and bool(_equal(weight, copy))


@jax.jit
def _equal(weight: Any, copy: Any) -> jax.Array:
    return jnp.array_equal(weight, copy)
