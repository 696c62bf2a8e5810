"""The warped law of one row, spelled out with full sorts."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Options:
    """Sampling options of one row; the defaults leave softmax(logits)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # -inf bans


def warp(logits, options: Options = Options(), history: Sequence[int] = (), emitted: int = 0) -> np.ndarray:
    """The law [V] after ``history`` (prompt and everything behind it), of which ``emitted`` tokens are new."""
    logits = edited_logits(logits, options, history, emitted)
    if options.temperature == 0:
        law = np.zeros(len(logits))
        law[int(np.argmax(logits))] = 1.0  # numpy's argmax is the lowest index among equals
        return law
    return filtered(logits, options)


def edited_logits(logits, options: Options, history: Sequence[int] = (), emitted: int = 0) -> np.ndarray:
    """Penalties, then bias and bans, then the end held back."""
    logits = np.array(logits, np.float64)
    for token, count in Counter(history).items():
        x = logits[token]
        x = x / options.repetition_penalty if x > 0 else x * options.repetition_penalty
        logits[token] = x - options.presence_penalty - options.frequency_penalty * count
    for token, bias in options.bias.items():
        logits[token] += bias
    if emitted < options.min_new_tokens:
        logits[list(options.eos_ids)] = -np.inf
    return logits


def filtered(logits: np.ndarray, options: Options) -> np.ndarray:
    """Temperature, top-k, top-p among what top-k left, min-p among what top-p left; each renormalises."""
    law = softmax(logits / options.temperature)
    rank = np.lexsort((np.arange(len(logits)), -logits))  # best first, the lower id first among equals
    if options.top_k > 0:
        law = keep(law, rank[: options.top_k])
    if options.top_p < 1:
        before = np.cumsum(law[rank]) - law[rank]  # mass ahead of each rank: the one that crosses stays
        law = keep(law, rank[before < options.top_p])  # never empty: nothing is ahead of the first
    return keep(law, np.flatnonzero(law >= options.min_p * law.max()))


def keep(law: np.ndarray, ids) -> np.ndarray:
    """``law`` restricted to ``ids`` and renormalised."""
    kept = np.zeros_like(law)
    kept[ids] = law[ids]
    return kept / kept.sum()


def softmax(logits: np.ndarray) -> np.ndarray:
    """exp(x - max) / sum; -inf has probability 0."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def margin(logits, options: Options, history: Sequence[int] = (), emitted: int = 0) -> float:
    """How far the nearest top-p or min-p decision is from going the other way; a float32 warp may differ below 1e-6."""
    logits = edited_logits(logits, options, history, emitted)
    if options.temperature == 0:
        return np.inf
    distances = [np.inf]
    law = filtered(logits, dataclasses.replace(options, top_p=1.0, min_p=0.0))
    if options.top_p < 1:
        rank = np.lexsort((np.arange(len(logits)), -logits))
        distances.append(np.abs(np.cumsum(law[rank]) - options.top_p).min())
        law = filtered(logits, dataclasses.replace(options, min_p=0.0))
    if options.min_p > 0:
        ratios = law[law > 0] / law.max()
        distances.append(np.abs(ratios - options.min_p)[ratios < 1].min(initial=np.inf))  # the best always stays
    return float(min(distances))
