"""Thousands of rows of one request through the public `prefill` and `round`, and chi-square on their joint law."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import stats

import specjax
from specjax import Drafter, Model, Text
from tests.oracle.hashlm import HashConfig, hash_logits, hash_params
from tests.oracle.joint import joint, warped
from tests.oracle.warp import Options
from tests.test_warp import sampling_of

THRESHOLD = 1e-3
PROMPT = (1, 2, 0)
CHUNK = 4
PAD = -1


def emit(
    model: Model, params, drafter: Drafter, rule: str, options: Sequence[Options], length: int, rows: int,
    seed: int, *, prompts: Sequence[Sequence[int]] | None = None, eos_ids=(),
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Tokens [len(options), rows, length] (PAD after a stop) and the rounds each row took [len(options), rows].

    ``prompts`` has one prompt per entry of ``options``, default PROMPT.
    """
    batch = len(options) * rows
    prompts = [PROMPT] * len(options) if prompts is None else prompts
    starts = np.repeat([len(prompt) for prompt in prompts], rows).astype(np.int32)
    slots = -(-(max(starts) + length + 1 + drafter.num_draft_tokens) // CHUNK) * CHUNK
    tokens = np.zeros((batch, slots), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i * rows : (i + 1) * rows, : len(prompt)] = prompt
    lengths = jnp.asarray(starts)
    keys = specjax.row_keys(seed * batch + np.arange(batch))
    sampling = sampling_of(options, model.vocab_size, eos_ids)
    every_row = {name: jnp.repeat(x, rows, axis=0) for name, x in sampling._asdict().items() if name != "eos_ids"}
    state = _decode(
        model, drafter._replace(params=()), rule, params, drafter.params, Text(jnp.array(tokens), lengths, lengths),
        keys, sampling._replace(**every_row), length,
    )  # fmt: skip
    where = starts[:, None] + np.arange(length)
    got = np.take_along_axis(np.array(state.text.tokens), where, axis=1)
    real = where < np.array(state.text.lengths)[:, None]
    got = np.where(real, got, PAD).reshape(len(options), rows, length)
    return got, np.array(state.counts.rounds).reshape(len(options), rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 8))
def _decode(model, drafter, rule, params, drafter_params, text, keys, sampling, length):
    drafter = drafter._replace(params=drafter_params)
    limits = specjax.no_limits(length, text.lengths.shape[0])
    state = specjax.prefill(model, params, drafter, text, keys, chunk=CHUNK)

    def body(state):
        return specjax.round(model, params, drafter, rule, state, sampling, limits)[0]

    return lax.while_loop(lambda state: jnp.any(state.finish == 0), body, state)


def histogram(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Counts [V + 1] * length of rows of tokens; the last index of an axis is PAD."""
    length = tokens.shape[-1]
    flat = np.ravel_multi_index(tuple(np.where(tokens == PAD, vocab, tokens).T), (vocab + 1,) * length)
    return np.bincount(flat, minlength=(vocab + 1) ** length).reshape((vocab + 1,) * length)


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of counts against a law of the same shape; cells expecting under 5 are pooled; 0 where the law
    has no mass but something was counted."""
    counts, expected = counts.ravel().astype(float), law.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    counts, expected = counts[expected > 0], expected[expected > 0]
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5 and len(expected) > 1:
            counts[-2:], expected[-2:] = counts[-2:].sum() / 2, expected[-2:].sum() / 2
    if len(expected) == 1:
        return 1.0
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def padded(law: np.ndarray) -> np.ndarray:
    """A law over [V] * L in the cells of `histogram`."""
    return np.pad(law, [(0, 1)] * law.ndim)


def assert_law(sample: Callable[[int], np.ndarray], laws: Sequence[np.ndarray], names: Sequence[object]) -> list[float]:
    """``sample(seed)`` gives counts per law. One fixed key; a p-value under 1e-3 is tried again on 16 pooled seeds.

    Returns the p-values of the fixed key.
    """
    first = sample(0)
    p_values = [p_value(counts, law) for counts, law in zip(first, laws, strict=True)]
    suspects = [i for i, p in enumerate(p_values) if p < THRESHOLD]
    if suspects:
        pooled = sum(sample(seed) for seed in range(1, 17))
        for i in suspects:
            p = p_value(pooled[i], laws[i])
            assert p >= THRESHOLD, f"{names[i]}: p = {p_values[i]:.1e}, pooled over 16 seeds {p:.1e}"
    return p_values


def target_laws(config: HashConfig, seed: int, options: Sequence[Options], length: int, prompt=PROMPT):
    """The exact joint laws of plain decoding of a `HashLM`, in histogram cells."""
    params = hash_params(config, seed)
    return [
        padded(joint(warped(lambda text: hash_logits(config, params, text)[-1], option, prompt), length))
        for option in options
    ]


def assert_hash_law(model: Model, params, drafter: Drafter, rule: str, options: Sequence[Options], prompt) -> None:
    """Four tokens behind ``prompt`` follow the law of plain decoding, for the target ``hash_lm(HashConfig(3), seed=0)``
    under each of the options."""
    def sample(seed):
        tokens, _ = emit(model, params, drafter, rule, options, 4, 5000, seed, prompts=[prompt] * len(options))
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, target_laws(HashConfig(3), 0, options, 4, prompt), options)
