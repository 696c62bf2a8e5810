"""Whether a head belongs to a target: what is refused before anything is compiled, with both facts in the message."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import LlamaConfig
from specjax.models.language_model import LanguageModel
from specjax.static import show, whole
from specjax.types import Array


def check_layers(layers: LlamaConfig) -> None:
    """Refuses decoder layers of a head that would not be run as they say: heads have Llama-like layers.

    Raises:
      ValueError: naming the field.
    """
    for name, plain in (("windows", ()), ("ropes", ()), ("embedding_scale", 1.0), ("logit_softcap", 0.0)):
        value = getattr(layers, name)
        if value != plain:
            raise ValueError(
                f"layers.{name}={show(value)}: the layers of a head have none of it; use dataclasses.replace(layers, "
                f"{name}={plain})"
            )


def check_target(
    what: str, target: LanguageModel, *, vocab_size: int, hidden_size: int, feature_layers: tuple[int, ...]
) -> None:
    """Refuses a head made for another target.

    Args:
      what: for messages.
      vocab_size: V the head was made for.
      hidden_size: of each of the target's hidden states it reads.
      feature_layers: which ones.

    Raises:
      ValueError: naming the head's fact and the target's.
    """
    if vocab_size != target.model.vocab_size:
        raise ValueError(
            f"{what} has a vocabulary of {vocab_size} tokens and the target one of {target.model.vocab_size}: it was "
            "made for another target"
        )
    layers = getattr(target.config, "num_layers", None)
    if layers is not None and max(feature_layers) > layers + 1:
        raise ValueError(
            f"{what} reads target layers {list(feature_layers)}, and the target has {layers}: the last to read is "
            f"{layers + 1}, what its head reads"
        )

    def features(params):
        cache, tokens = target.model.init_cache(1, 2), jnp.zeros((1, 1), jnp.int32)
        return target.model.apply(params, tokens, tokens, None, cache, feature_layers=feature_layers).features

    try:
        size = jax.eval_shape(features, target.params).shape[-1]
    except IndexError:
        raise ValueError(f"{what} reads target layers {list(feature_layers)}, which the target does not have") from None
    if size != hidden_size * len(feature_layers):
        raise ValueError(
            f"{what} has hidden size {hidden_size} and the target {size // len(feature_layers)}: it was made for "
            "another target"
        )


def check_context(what: str, context: int, target: LanguageModel, max_length: Any) -> None:
    """Refuses a head that was made for shorter texts than will be asked for.

    Raises:
      ValueError: naming both lengths.
    """
    if max_length is not None:
        max_length = whole("max_length", max_length, 1, "; None is the target's context")
    longest = max_length or target.model.context_length
    if longest is not None and context < longest:
        raise ValueError(
            f"{what} was made for texts of {context} tokens and they may have {longest}: pass max_length={context} if "
            "yours are no longer than that"
        )


def target_weight(what: str, target: LanguageModel, name: str) -> Array:
    """The target's "embedding" or "head", by reference.

    Raises:
      ValueError: if the target has none.
    """
    params = target.params if isinstance(target.params, dict) else {}
    weight = params.get(name, params.get("embedding"))
    if weight is None:
        raise ValueError(
            f"{what} has no {name} of its own and the target no params[{show(name)}] [V, E]: give what specjax.load "
            "returns, or add it to the head's params"
        )
    return weight


def check_ids(what: str, ids: Any, size: int, vocab_size: int) -> None:
    """Refuses target ids of a reduced vocabulary that are not ``size`` different ones in ascending order.

    Raises:
      ValueError: naming the first that is wrong.
    """
    array = np.asarray(ids)
    if array.shape != (size,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what}: ids has shape {array.shape} and type {array.dtype}, give [{size}] integers")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(f"{what}: ids has {outside[0]}, outside the target's vocabulary of {vocab_size} tokens")
    if np.any(np.diff(array) <= 0):
        raise ValueError(f"{what}: ids must be different and in ascending order (permute the head's rows with them)")
