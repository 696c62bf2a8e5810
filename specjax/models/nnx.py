"""Flax NNX modules as pure models: `from_nnx` splits one into functions and weights."""

from typing import Any

import jax
from flax import nnx

from specjax.static import bind
from specjax.types import KVCache, Model, ModelOutput, PyTree


def from_nnx(
    module: nnx.Module, *, vocab_size: int | None = None, context_length: int | None = None
) -> tuple[Model, PyTree]:
    """Splits a module into a pure `Model` and its parameters, a nested dict of arrays.

    The module holds weights only. Its ``__call__(tokens, positions, window_mask, cache, *, feature_layers=(),
    logits_at=None)`` returns a `ModelOutput`, as `Model.apply` does without the parameters, and its
    ``init_cache(batch, capacity)`` makes an empty cache. Two equal modules give equal models, whatever their weights,
    so a program compiled for one serves the other. Weights may be ShapeDtypeStructs, as `nnx.eval_shape` makes them.

    Args:
      module: the module.
      vocab_size: size of the vocabulary; None reads ``module.vocab_size``.
      context_length: positions the model was made for; None reads ``module.context_length``, no limit if it has none.

    Raises:
      TypeError: if the module has no ``init_cache``, or holds an attribute that cannot be hashed.
      ValueError: if the vocabulary size is nowhere to be found, or the module holds random state or a cache.
    """
    if not callable(getattr(module, "init_cache", None)):
        raise TypeError(f"{type(module).__name__} needs a method init_cache(batch, capacity) -> KVCache")
    if vocab_size is None:
        vocab_size = getattr(module, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"{type(module).__name__} has no attribute vocab_size: pass vocab_size=")
    if context_length is None:
        context_length = getattr(module, "context_length", None)
    graph, state = nnx.split(module)
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngState | nnx.Cache):
            name = ".".join(map(str, path))
            raise ValueError(
                f"{name} is {type(variable).__name__}: a module for specjax holds weights only (the cache is an "
                "argument, and nothing in a forward pass is random)"
            )
    try:
        hash(graph)
    except TypeError as error:
        raise TypeError(f"attributes of {type(module).__name__} must be hashable, {error}") from error
    params = nnx.to_pure_dict(state)
    shapes, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    init_cache = bind(_init_cache, graph, tree, tuple(shapes))
    return Model(init_cache, bind(_apply, graph), int(vocab_size), context_length), params


def _init_cache(graph: Any, tree: Any, shapes: tuple, batch: int, capacity: int) -> KVCache:
    return nnx.merge(graph, jax.tree.unflatten(tree, shapes)).init_cache(batch, capacity)


def _apply(
    graph: Any, params: PyTree, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None
) -> ModelOutput:
    module = nnx.merge(graph, params)
    return module(tokens, positions, window_mask, cache, feature_layers=feature_layers, logits_at=logits_at)
