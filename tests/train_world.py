"""What the tests of training share: weights drawn without compiling anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import LanguageModel
from specjax.models import llama, llama_params
from specjax.models.config import LlamaConfig


def drawn(shapes: Any, seed: int, scale: float) -> Any:
    """Random float32 weights of these shapes, norms around 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        around = any(str(getattr(key, "key", "")).endswith("norm") for key in path)
        return jnp.asarray(float(around) + scale * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def language_model(config: LlamaConfig, seed: int = 3) -> LanguageModel:
    """A target whose laws have something to say."""
    params = drawn(llama_params.abstract_params(config), seed, 0.1)
    params |= {name: jnp.asarray(10 * np.asarray(params[name])) for name in ("embedding", "head") if name in params}
    return LanguageModel(llama.model(config), params, config=config)
