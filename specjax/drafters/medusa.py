"""Medusa: extra heads on the target's last hidden state, one per position ahead.

Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, arXiv 2401.10774 (2024).
The greedy chain of such heads is older: Stern et al., Blockwise Parallel Decoding for Deep Autoregressive Models, arXiv
1811.03115 (2018), see `blockwise`.

The hidden state that predicted token t (by the target's own head) is read by head i, counted from 0, which predicts
token t + 1 + i. When a round starts, t is the pending token: head 0 speaks about the first draft token.

Weights, matrices [out, in] (`specjax.drafters.medusa_files` for the published layout):

    heads/i/blocks/j/weight [E, E], heads/i/blocks/j/bias [E]    x + silu(x W^T + b)
    heads/i/projection [V, E]                                    absent when the target's projection is shared
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import tree as topology
from specjax.drafters import parallel
from specjax.models.language_model import LanguageModel, checked
from specjax.models.llama import linear
from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text

# The 63 nodes the authors found for Vicuna-7B, by the ranks on the way down: what `specjax.tree.choices` reads.
MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = (
    *((i,) for i in range(10)),
    *((0, i) for i in range(10)), *((1, i) for i in range(7)), *((2, i) for i in range(3)), (3, 0), (3, 1),
    *((i, 0) for i in range(4, 10)),
    *((0, 0, i) for i in range(10)), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (0, 2, 1),
    *((0, i, 0) for i in range(3, 8)), (1, 0, 0), (1, 0, 1), (2, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads.

    Raises:
      ValueError: a size that is no whole number.
    """

    hidden_size: int  # E, the target's
    vocab_size: int  # V, the target's
    num_heads: int = 4  # positions ahead
    num_layers: int = 1  # residual blocks per head
    shared: bool = False  # project with the target's own head instead of one matrix per head

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "num_heads"):
            whole(name, getattr(self, name), 1)
        whole("num_layers", self.num_layers, 0)
        if not isinstance(self.shared, bool):
            raise ValueError(f"shared={show(self.shared)}: must be True or False")


class Block(nnx.Module):
    """x + silu(linear(x))."""

    def __init__(self, weight: Array, bias: Array):
        self.weight, self.bias = nnx.Param(weight), nnx.Param(bias)

    def __call__(self, x: Array) -> Array:
        return x + jax.nn.silu(linear(x, self.weight, self.bias))


class Head(nnx.Module):
    """Residual blocks and, unless it is shared, a projection."""

    def __init__(self, blocks: Sequence[Block], projection: Array | None):
        self.blocks = nnx.List(blocks)
        self.projection = None if projection is None else nnx.Param(projection)

    def trunk(self, x: Array) -> Array:
        """What the projection reads."""
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, x: Array, shared: Any) -> Array:
        return linear(self.trunk(x), shared if self.projection is None else self.projection)


class Medusa(nnx.Module):
    """The heads: weights only. Made with random weights; `fresh_params` starts as the paper does."""

    def __init__(self, config: MedusaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs | None = None):
        rngs, size = nnx.Rngs(0) if rngs is None else rngs, config.hidden_size

        def fresh(*shape):
            return (size**-0.5 * jax.random.normal(rngs.params(), shape)).astype(dtype)

        self.config = config
        self.heads = nnx.List([
            Head(
                [Block(fresh(size, size), jnp.zeros(size, dtype)) for _ in range(config.num_layers)],
                None if config.shared else fresh(config.vocab_size, size),
            )
            for _ in range(config.num_heads)
        ])  # fmt: skip

    def __call__(self, hidden: Array, shared: Any = None, count: int | None = None) -> Array:
        """hidden [B, T, E] -> logits [B, T, K, V] of the first ``count`` heads (None: all); ``shared`` [V, E]."""
        heads: Any = self.heads
        if self.config.shared:  # one product for all heads: the projection is read once
            rows = jnp.stack([head.trunk(hidden) for head in list(heads)[:count]], axis=2)
            return linear(rows, shared)
        return jnp.stack([head(hidden, shared) for head in list(heads)[:count]], axis=2)


class _Params(NamedTuple):
    heads: PyTree
    shared: Array | None  # the target's projection, if it is used


def abstract_params(config: MedusaConfig, dtype=jnp.float32) -> PyTree:
    """Names, shapes and dtypes of the weights."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Medusa(config, dtype=dtype))))


def fresh_params(
    config: MedusaConfig, target: LanguageModel | None = None, *, rngs: nnx.Rngs | None = None, dtype=jnp.float32
) -> PyTree:
    """Weights to start from: random, or, with a target, as in the paper: blocks that do nothing yet (weight and bias
    0) and the target's own projection, so that every head begins by repeating the target's prediction."""
    params = nnx.to_pure_dict(nnx.state(Medusa(config, dtype=dtype, rngs=rngs)))
    if target is None:
        return params
    start = parallel.projection(target).astype(dtype)
    for head in params["heads"].values():
        head["blocks"] = jax.tree.map(jnp.zeros_like, head.get("blocks", {}))
        if not config.shared:
            head["projection"] = jnp.array(start)
    return params


def medusa(
    config: MedusaConfig, params: PyTree, target: LanguageModel, num_draft_tokens: int | None = None, *,
    tree: Any = None, coupled: bool = False,
) -> Drafter:  # fmt: skip
    """Drafts with Medusa heads.

    Args:
      config, params: the heads, see the module's docstring; `fresh_params` makes some.
      target: the model they read; its projection is referenced where it is shared.
      num_draft_tokens: chain length, default one per head. A tree has its own number of nodes.
      tree: None draws a chain from the heads' laws, each warped like the target's (rule "rejection"). Static parents,
        for instance ``specjax.tree.choices(MEDUSA_CHOICES)``, take the top tokens of each head as children by rank.
        `specjax.tree.Dynamic` chooses the likeliest paths in each round.
      coupled: draw the chain with the target's own noise (rule "match").

    Raises:
      ValueError: heads made for another target (names both facts), weights that are not the configuration's, a tree
        deeper than there are heads.
    """
    target = checked("target", target)
    if not isinstance(config, MedusaConfig):
        raise ValueError(f"config={show(config)}: give a MedusaConfig")
    hidden, layers = parallel.sizes(target)
    facts = {"hidden_size": (config.hidden_size, hidden), "vocab_size": (config.vocab_size, target.model.vocab_size)}
    parallel.check_fit("the Medusa head", facts)
    parallel.check_params("Medusa", params, abstract_params(config))
    form = parallel.form(tree, num_draft_tokens, coupled, config.num_heads, config.vocab_size, "heads")
    return Drafter(
        params=_Params(params, parallel.projection(target) if config.shared else None),
        init=bind(_init, hidden),
        observe=_observe,
        draft=bind(_draft, config, form),
        num_draft_tokens=form.num_nodes,
        feature_layers=(layers + 1,),
        default_rule=form.default_rule,
        vocab_size=config.vocab_size,
    )


def blockwise(
    config: MedusaConfig, params: PyTree, target: LanguageModel, num_draft_tokens: int | None = None
) -> Drafter:
    """The greedy chain of the heads: the top token of each, a point mass (Stern et al. 2018).

    Raises:
      ValueError: as `medusa`.
    """
    if not isinstance(config, MedusaConfig):
        raise ValueError(f"config={show(config)}: give a MedusaConfig")
    count = config.num_heads if num_draft_tokens is None else whole("num_draft_tokens", num_draft_tokens, 1)
    if count > config.num_heads:
        raise ValueError(f"num_draft_tokens={count}, but there are {config.num_heads} heads: ask for as many or fewer")
    return medusa(config, params, target, tree=topology.chain(count))


def _init(hidden: int, params: PyTree, batch: int, capacity: int) -> Array:
    return jnp.zeros((batch, hidden))


def _observe(params: PyTree, state: Array, committed: Committed) -> Array:
    """Keeps the hidden state that predicted the pending token."""
    last = jnp.maximum(committed.count - 1, 0)
    newest = jnp.take_along_axis(committed.features, last[:, None, None], axis=1)[:, 0]
    return jnp.where(committed.count[:, None] > 0, newest.astype(jnp.float32), state)


def _draft(
    config: MedusaConfig, form: parallel.Form, params: _Params, keys: Array, state: Array, text: Text,
    sampling: Sampling, n: int,
) -> tuple[Proposal, Array]:  # fmt: skip
    heads: Any = nnx.merge(graph(config), params.heads)
    logits = heads(state[:, None], params.shared, min(form.depth, n))[:, 0]
    laws = parallel.Laws(logits)
    return parallel.propose(form, laws, keys, text, sampling, config.vocab_size, n), state


@functools.cache
def graph(config: MedusaConfig) -> Any:
    """What ``nnx.merge(graph(config), params)`` needs to make the module of weights."""
    return nnx.split(nnx.eval_shape(lambda: Medusa(config)))[0]
