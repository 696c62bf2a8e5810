"""Exact joint laws by plain autoregressive enumeration."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracle.warp import Options, warp

Law = Callable[[tuple[int, ...]], np.ndarray]  # tokens behind the prompt -> law [V] of the next one


def warped(logits: Callable[[tuple[int, ...]], np.ndarray], options: Options, prompt: Sequence[int]) -> Law:
    """The law after each continuation of ``prompt``; ``logits`` sees the whole text. Remembers what it computed."""
    memory: dict[tuple[int, ...], np.ndarray] = {}

    def law(continuation: tuple[int, ...]) -> np.ndarray:
        if continuation not in memory:
            text = (*prompt, *continuation)
            memory[continuation] = warp(logits(text), options, text, len(continuation))
        return memory[continuation]

    return law


def joint(law: Law, length: int) -> np.ndarray:
    """The probability of every continuation: [V] * length, sums to 1."""
    vocab = len(law(()))
    result = np.zeros((vocab,) * length)
    for tokens in itertools.product(range(vocab), repeat=length):
        probability = 1.0
        for i, token in enumerate(tokens):
            probability *= law(tokens[:i])[token]
            if probability == 0:
                break
        result[tokens] = probability
    return result


def completed(blocks: dict[tuple[int, ...], float], law: Law, length: int) -> np.ndarray:
    """The joint law of ``length`` tokens when one round emits a block and the target continues by itself.

    An exact rule gives `joint(law, length)`, whatever was drafted. Blocks longer than ``length`` are cut.
    """
    vocab = len(law(()))
    result = np.zeros((vocab,) * length)
    for block, probability in blocks.items():
        if len(block) >= length:
            result[block[:length]] += probability
            continue
        for tail in itertools.product(range(vocab), repeat=length - len(block)):
            tokens = block + tail
            share = probability
            for i in range(len(block), length):
                share *= law(tokens[:i])[tokens[i]]
            result[tokens] += share
    return result
