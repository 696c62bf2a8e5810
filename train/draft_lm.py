"""Small language models that draft for a large one: where they start from.

A draft model is a plain `specjax.LanguageModel` with the target's vocabulary and tokenizer: `specjax.drafters.model`
drafts with it, `specjax.models.save` writes it, `specjax.load` and `specjax.load_drafter` read it. Its loss is
`specjax.train.students.draft_lm_loss`; what it writes itself, for the target to score, comes from `on_policy`.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import sharding
from specjax.generate import generate
from specjax.models import int8, llama
from specjax.models.config import LlamaConfig
from specjax.models.language_model import LanguageModel, checked
from specjax.models.nnx import from_nnx
from specjax.static import bind, show, whole
from specjax.train.types import Batch
from specjax.types import PyTree


def spread(count: Any, num_layers: int) -> tuple[int, ...]:
    """``count`` of ``num_layers`` layers, the first and the last among them, the others evenly between; one is the
    last.

    >>> spread(3, 30), spread(1, 30)
    ((0, 14, 29), (29,))

    Raises:
      ValueError: fewer than one, or more than there are.
    """
    if whole("layers", count, 1) > num_layers:
        raise ValueError(f"layers={count}: the target has {num_layers}")
    if count == 1:
        return (num_layers - 1,)
    return tuple(int(i * (num_layers - 1) / (count - 1)) for i in range(count))


def prune(target: LanguageModel, layers: int | Sequence[int]) -> LanguageModel:
    """The target with few of its layers: embedding, final norm and head are its own.

    Args:
      target: a Llama-family model, its params unrolled or stacked.
      layers: which ones, from 0, or how many, see `spread`.

    Returns:
      A model with unrolled layers whose weights are the target's arrays, on a mesh where the target is on one.

    Raises:
      ValueError: layers that the target does not have, or twice the same, or none; a target of another family.
    """
    config = _config_of(int8.floating("target", target))
    if isinstance(layers, (tuple, list, np.ndarray)):
        kept = tuple(whole("layers", layer, 0) for layer in layers)
    else:
        kept = spread(layers, config.num_layers)
    if not kept or len(set(kept)) < len(kept) or max(kept) >= config.num_layers:
        raise ValueError(f"layers={show(layers)}: give different ones of 0 to {config.num_layers - 1}")
    every = target.params["layers"]
    if "qkv" in every:  # stacked
        chosen = [jax.tree.map(operator.itemgetter(layer), every) for layer in kept]
    else:
        chosen = [every[layer] for layer in kept]
    params = {**target.params, "layers": dict(enumerate(chosen))}
    config = dataclasses.replace(config, num_layers=len(kept))
    model, layout = llama.model(config, dtype=params["embedding"].dtype), target.model.layout
    model = model if layout is None else sharding.on_mesh(layout.mesh, model, layout.rules)
    return target._replace(model=model, params=params, config=config)


def fresh(
    target: LanguageModel, *, hidden_size: int, num_layers: int, tie_embeddings: bool = True, seed: int = 0,
    **settings: Any,
) -> LanguageModel:  # fmt: skip
    """A random model with the target's vocabulary, tokenizer and context, on a mesh where the target is on one.

    Args:
      target: a Llama-family model.
      hidden_size, num_layers: sizes; heads have the target's head size where that divides ``hidden_size``.
      tie_embeddings: the output head is the embedding.
      seed: of the weights.
      settings: other fields of `specjax.models.LlamaConfig`, e.g. ``intermediate_size`` (default 8/3 of hidden_size,
        in sixteens), ``num_heads``, ``num_kv_heads``.

    Raises:
      ValueError: sizes that do not fit each other; an unknown setting.
    """
    config = _config_of(target)
    hidden_size, num_layers = whole("hidden_size", hidden_size, 1), whole("num_layers", num_layers, 1)
    for name in settings:
        if name not in {field.name for field in dataclasses.fields(LlamaConfig)} - {"vocab_size"}:
            raise ValueError(f"{name}={show(settings[name])}: no field of LlamaConfig that a draft model can choose")
    heads = settings.get("num_heads") or max(1, hidden_size // config.head_dim)
    sizes = {
        "intermediate_size": -(-8 * hidden_size // 48) * 16, "num_heads": heads, "num_kv_heads": heads, "head_dim": 0,
        "quantization": "", "qk_norm": False, "attention_bias": False, "mlp_bias": False, **settings,
    }  # fmt: skip
    config = dataclasses.replace(
        config, hidden_size=hidden_size, num_layers=num_layers, tie_embeddings=tie_embeddings, **sizes
    )
    model, params = from_nnx(llama.Llama(config, rngs=nnx.Rngs(seed)))
    made, layout = target._replace(model=model, params=params, config=config), target.model.layout
    return made if layout is None else sharding.place(layout.mesh, made, layout.rules)


def _config_of(target: LanguageModel) -> LlamaConfig:
    config = checked("target", target).config
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"target={show(target)}: a draft model is made like a model with a LlamaConfig")
    return config


def on_policy(
    draft: LanguageModel, *, every: int = 2, given: int = 8, temperature: float = 1.0, seed: int = 0
) -> Callable[[int, Batch, PyTree], Batch]:
    """Makes every ``every``-th batch of a run one that the draft model writes itself, for the target to score.

    Such a batch keeps the first ``given`` tokens of each row; the draft goes on from there to the end of the row, or to
    an end token, and only its own tokens count. Zhou et al., DistillSpec: Improving Speculative Decoding via Knowledge
    Distillation, arXiv 2310.08461 (2023).

    Args:
      draft: the model that is trained; its own params are not used.
      every: 1 is every batch.
      given: tokens of a row that stay; rows have at least so many, of one text.
      temperature: of the draft's samples; 0 is greedy.
      seed: of the samples, which differ from step to step and are the same when a run is repeated.

    Returns:
      ``(step, batch, params) -> batch`` with the params as they are at that step: `specjax.train.trainer.fit` takes it
      as ``rewrite``.

    Raises:
      ValueError: numbers that are none.
    """
    every, given, seed = whole("every", every, 1), whole("given", given, 1), whole("seed", seed, 0)
    return bind(_rewrite, checked("draft", draft)._replace(params=()), every, given, temperature, seed)


def _rewrite(draft, every, given, temperature, seed, step: int, batch: Batch, params: PyTree) -> Batch:
    if (step + 1) % every:
        return batch
    rows = np.asarray(batch.tokens)
    made = own_text(
        draft._replace(params=params), rows[:, :given], rows.shape[1], temperature=temperature,
        seed=seed + step * rows.shape[0],
    )  # fmt: skip
    if batch.documents is None:
        return made
    real = made.counts | (jnp.arange(rows.shape[1]) < given)[None]
    return made._replace(documents=jnp.where(real, 0, -1).astype(jnp.int32))


def own_text(
    draft: LanguageModel, prompts: Any, width: int, *, temperature: float = 1.0, seed: int = 0
) -> Batch:
    """What a model writes after prompts [B, P], as a batch [B, width] in which its own tokens count.

    Raises:
      ValueError: no room behind the prompts.
    """
    prompts = np.asarray(prompts)
    batch, given = prompts.shape
    if given >= width:
        raise ValueError(f"width={show(width)}: prompts of {given} tokens leave no room in it")
    made = generate(
        draft, [row.tolist() for row in prompts], max_new_tokens=width - given, temperature=temperature,
        seed=[seed + row for row in range(batch)],
    ).tokens  # fmt: skip
    tokens, counts = np.zeros((batch, width), np.int32), np.zeros((batch, width), bool)
    tokens[:, :given] = prompts
    for row, text in enumerate(made):
        tokens[row, given : given + len(text)] = text
        counts[row, given : given + len(text)] = True
    return Batch(jnp.asarray(tokens), jnp.asarray(counts))
