"""What a generation returns, and how tokens become text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.round import CAPACITY, FINISH_REASONS, LENGTH
from specjax.stats import Stats


class Generation(NamedTuple):
    """The result of `specjax.generate`, one entry per row (prompts in order, the n samples of a prompt together)."""

    texts: list[str] | None  # None for a model without tokenizer; control tokens are left out
    tokens: list[list[int]]  # emitted ids, the end id or the token that completed a stop string included
    finish_reasons: list[str | None]  # stop, length, capacity or nonfinite; None for an interrupted stream
    logprobs: list[np.ndarray] | None  # float32 per emitted token under softmax(logits); None unless asked for
    warped_logprobs: list[np.ndarray] | None  # the same under the law that was sampled
    stats: Stats
    lossless: bool = True  # the output law is the warped target's


def reasons(finish: np.ndarray, truncated: np.ndarray) -> list[str | None]:
    """Finish codes [B] as words; a budget that was cut to fit ends with "capacity"."""
    codes = np.where((finish == LENGTH) & truncated, CAPACITY, finish)
    return [FINISH_REASONS[code] for code in codes]


class Detokenizer:
    """Turns tokens into text piece by piece, never half a character.

    The text of a token can depend on its neighbours, so a piece is the difference of two decodings that start at the
    same token; text ending in U+FFFD waits for the bytes that complete it.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self._start = 0  # first token of the decoding window
        self._shown = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly empty."""
        self.tokens.append(token)
        before = self._decode(self.tokens[self._start : self._shown])
        now = self._decode(self.tokens[self._start :])
        if now.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self.tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """What is still held back at the end of the text."""
        before = self._decode(self.tokens[self._start : self._shown])
        now = self._decode(self.tokens[self._start :])
        self._start = self._shown = len(self.tokens)
        return now[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class StopStrings:
    """Watches a growing text for stop strings, holding back what may become one."""

    def __init__(self, strings: Sequence[str]):
        self.strings = strings
        self.held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is safe to show after ``piece``; ``found`` is set once a stop string is complete."""
        text = self.held + piece
        hits = [text.find(string) for string in self.strings if string in text]
        if hits:
            self.found, self.held = True, ""
            return text[: min(hits)]
        keep = max((n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be text."""
        held, self.held = self.held, ""
        return held
