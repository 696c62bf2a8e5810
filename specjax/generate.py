"""generate: the whole loop as one compiled program. stream: the same rounds, one at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import adaptive as pacing
from specjax import engine, loop, processes, request
from specjax.accept import Rule, Typical
from specjax.adaptive import Policy
from specjax.models.language_model import LanguageModel, checked
from specjax.request import Request
from specjax.result import Detokenizer, Generation, StopStrings, reasons
from specjax.round import RUNNING, STOP, State
from specjax.static import whole
from specjax.stats import Counts, Stats
from specjax.types import Drafter


def generate(
    lm: LanguageModel,
    prompts: Any,
    *,
    drafter: Drafter | None = None,
    rule: Rule | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    seed: int | Sequence[int] = 0,
    n: int = 1,
    chat: bool = False,
    eos_ids: int | Sequence[int] | None = None,
    stop: Any = (),
    logprobs: bool = False,
    on_capacity: str = "error",
    prefill_chunk: int | None = None,
    slots: int | None = None,
    adaptive: bool | Policy = False,
    **sampling: Any,
) -> Generation:
    """Continues prompts with the target's own words, drafted ahead where a drafter is given.

    Args:
      lm: what `specjax.load` returned, or ``LanguageModel(model, params)`` around your own.
      prompts: a string, token ids, a conversation (list of messages, with chat=True), or a list of any of them.
        ``[]`` is an empty batch. An empty prompt becomes the begin token, if the model has one.
      drafter: a draft source; None decodes plainly.
      rule: "rejection", "block" or "match". Default: "rejection" where proposals carry probabilities, "match" for
        point masses and plain decoding. These are exact; `specjax.Typical()` is not, and the result says so. With
        "match" the text depends on prompt and seed alone; with the others the draws, not their law, may differ between
        drafters and numbers of draft tokens.
      max_new_tokens: one number, or one per prompt.
      seed: an int s gives row i the seed s + i; or one per row. Prompt and seed determine the text: alone, in any
        batch, at any index (with ``adaptive``, whose choice is the batch's: greedy and under "match").
      n: samples per prompt; row i * n + j is sample j of prompt i.
      chat: apply the model's chat template.
      eos_ids: ids that end a text, default the model's; [] never stops.
      stop: strings and token sequences (lists of ids) that end a text. Tokens end with the one that completes the
        match; the text is cut before a stop string. With stop strings, and with drafters that need Python
        (`specjax.drafters.host`), the rounds are run from Python.
      logprobs: report log-probabilities of the emitted tokens, raw and warped.
      on_capacity: "error" refuses a request that does not fit the model's context; "truncate" cuts its budget, and a
        row that uses it up ends with "capacity".
      prefill_chunk: prompt tokens per forward pass. None: 64 to 256, by the cache's size and the rows.
      slots: decode at most this many rows at a time, the next one as soon as a text ends (`specjax.Engine`): for many
        prompts, or texts of unequal length. The result is the same (under "rejection" and "block", in law). None: all
        at once.
      adaptive: choose the number of draft tokens before every round, for the whole batch, from past rounds: True or
        `specjax.Adaptive` by measured costs, decoding plainly where drafts do not pay; `specjax.Heuristic` and
        `specjax.Fixed` to compare. The first use with a model, drafter and batch size on a machine compiles what is
        measured, seconds for a small model, minutes for one of many layers on a CPU: see `specjax.theory.cost_model`.
        Laws do not change; under "rejection" and "block" draws may. Not with drafters that need Python.
      **sampling: temperature (default 0, greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, logit_bias, banned_tokens, min_new_tokens; each one value, or one per prompt. See
        `specjax.make_sampling`. The same law holds with and without a drafter.

    Raises:
      ValueError: an option or prompt that cannot be honoured; names it, its value and the remedy.
      TypeError: an unknown option.
    """
    if slots is not None:
        slots = whole("slots", slots, 1, "; None decodes all prompts at once")
    made = request.make(
        lm, prompts, drafter=drafter, rule=rule, max_new_tokens=max_new_tokens, seed=seed, n=n, chat=chat,
        eos_ids=eos_ids, stop=stop, logprobs=logprobs, on_capacity=on_capacity, prefill_chunk=prefill_chunk,
        adaptive=adaptive if slots is None else False, **sampling,  # with slots, for as many rows as they are
    )  # fmt: skip
    depth = 0 if drafter is None else drafter.num_draft_tokens
    if slots is not None:
        pacing.checked(adaptive, depth)  # the engine does, but there may be no prompt
    if made is None:
        empty = [] if logprobs else None
        return Generation([], [], [], empty, empty, Stats(jax.tree.map(np.asarray, Counts.zeros(0, depth))))
    if slots is not None:
        fixed = {
            "drafter": drafter, "rule": rule, "logprobs": logprobs, "prefill_chunk": made.chunk, "adaptive": adaptive,
        }  # fmt: skip
        served = engine.for_request(lm, made, slots, **fixed)
        return served.finish(served.submit(made))
    if made.stop_strings or made.host is not None:
        rounds = Rounds(made, lm.tokenizer)
        for _ in rounds:
            pass
        return rounds.result()
    state = made.start()
    state, record = loop.decode(made.program, made.weights, state, made.sampling, made.limits)
    text, finish, counts, record = processes.fetch((state.text, state.finish, state.counts, record))
    spans = [slice(start, end) for start, end in zip(text.prompt_lengths, text.lengths, strict=True)]

    def take(values):
        return [row[span] for row, span in zip(values, spans, strict=True)]

    tokens = [row.tolist() for row in take(text.tokens)]
    texts = None if lm.tokenizer is None else [lm.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    raw, warped = (take(record.raw), take(record.warped)) if logprobs else (None, None)
    lossless = not isinstance(made.program.rule, Typical)
    return Generation(texts, tokens, reasons(finish, made.truncated), raw, warped, Stats(counts), lossless)


class Rounds:
    """Rounds of a request driven from Python, one device-to-host transfer each. Iterating yields the new tokens:
    a list per row of (token, text it completes, came from a draft)."""

    def __init__(self, made: Request, tokenizer: Any):
        self.request = made
        rows = made.keys.shape[0]
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.texts = ["" for _ in range(rows)]
        self.finish = np.full(rows, RUNNING)
        self._logprobs: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
        self._detokenizers = None if tokenizer is None else [Detokenizer(tokenizer) for _ in range(rows)]
        self._stops = [StopStrings(made.stop_strings) for _ in range(rows)]
        self._counts = jax.device_get(Counts.zeros(rows, made.program.drafter.num_draft_tokens))

    def __iter__(self) -> Iterator[list[list[tuple[int, str, bool]]]]:
        made = self.request
        state = made.start()
        self.finish = processes.fetch(state.finish)
        propose = None if made.host is None else made.host()
        prompts = [] if propose is None else self._prompts()
        while np.any(self.finish == RUNNING):
            if propose is not None:
                state = state._replace(drafter=propose(self._rows(prompts)))
            state, info = loop.step(made.program, made.weights, state, made.sampling, made.limits)
            info, finish, counts, lengths = processes.fetch((info, state.finish, state.counts, state.text.lengths))
            pieces = [self._take(row, info) for row in range(len(self.tokens))]
            kept = np.asarray([len(row) for row in pieces])
            state = self._settle(state, info, finish, counts, lengths, kept)
            yield pieces

    def _prompts(self) -> list[list[int]]:
        tokens, lengths = jax.device_get((self.request.text.tokens, self.request.text.lengths))
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]

    def _rows(self, prompts: list[list[int]]) -> list[list[int] | None]:
        """Prompt and committed tokens of the rows that go on."""
        going = self.finish == RUNNING
        return [p + t if on else None for p, t, on in zip(prompts, self.tokens, going, strict=True)]

    def _take(self, row: int, info: Any) -> list[tuple[int, str, bool]]:
        """Appends what a round added to a row, up to a stop string."""
        pieces = []
        for i in range(info.count[row]):
            token = int(info.tokens[row, i])
            self.tokens[row].append(token)
            if info.raw_logprobs is not None:
                self._logprobs[row].append((info.raw_logprobs[row, i], info.warped_logprobs[row, i]))
            piece = "" if self._detokenizers is None else self._detokenizers[row].push(token)
            piece = self._stops[row].push(piece)
            self.texts[row] += piece
            pieces.append((token, piece, bool(i < info.num_accepted[row])))
            if self._stops[row].found:
                break
        return pieces

    def _settle(
        self, state: State, info: Any, finish: np.ndarray, counts: Counts, lengths: np.ndarray, kept: np.ndarray
    ) -> State:
        """Ends rows at stop strings: state, counts and finish are cut like the tokens."""
        found = np.asarray([stops.found for stops in self._stops]) & (self.finish == RUNNING)
        if np.any(found):
            kept = np.where(found, kept, info.count)
            counts = self._counts.cut(counts, kept)
            finish = np.where(found, STOP, finish).astype(np.int32)
            state = state._replace(counts=jax.tree.map(jnp.asarray, counts))
            state = loop.cut(state, jnp.asarray(lengths - info.count + kept), jnp.asarray(finish))
        for row in np.flatnonzero((finish != RUNNING) & (self.finish == RUNNING) & ~found):
            tail = "" if self._detokenizers is None else self._detokenizers[row].flush()
            self.texts[row] += self._stops[row].push(tail) + self._stops[row].flush()
        self.finish, self._counts = finish, counts
        return state

    def result(self) -> Generation:
        """What has been generated so far; ``finish_reasons`` of rows that have not ended are None."""
        made = self.request
        raw = warped = None
        if made.program.logprobs:
            raw = [np.asarray([pair[0] for pair in row], np.float32) for row in self._logprobs]
            warped = [np.asarray([pair[1] for pair in row], np.float32) for row in self._logprobs]
        texts = None if self._detokenizers is None else list(self.texts)
        tokens = [list(row) for row in self.tokens]
        return Generation(
            texts, tokens, reasons(self.finish, made.truncated), raw, warped, Stats(self._counts),
            lossless=not isinstance(made.program.rule, Typical),
        )  # fmt: skip


class Stream:
    """Iterator over the text of one generation, a piece per run of tokens from the same source.

    ``drafted`` tells whether the last piece came from accepted draft tokens; ``result`` is what has been generated
    so far, and stays available after Ctrl-C or an early ``break``.
    """

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self._pieces = self._run()
        self.drafted = False

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        piece, self.drafted = next(self._pieces)
        return piece

    @property
    def result(self) -> Generation:
        """The generation so far; the same as `generate` returns once the stream has ended."""
        return self._rounds.result()

    def _run(self) -> Iterator[tuple[str, bool]]:
        shown = 0
        for pieces in self._rounds:
            runs: list[tuple[str, bool]] = []
            for _, piece, drafted in pieces[0]:
                if runs and runs[-1][1] == drafted:
                    runs[-1] = (runs[-1][0] + piece, drafted)
                else:
                    runs.append((piece, drafted))
            for piece, drafted in runs:
                if piece:
                    shown += len(piece)
                    yield piece, drafted
        if self._rounds.texts[0][shown:]:
            yield self._rounds.texts[0][shown:], False


def stream(lm: LanguageModel, prompt: str | Sequence[int] | Sequence[Mapping[str, str]], **options: Any) -> Stream:
    """Generates for one prompt and yields text as rounds commit it, never half a character.

    Args:
      lm: a model with a tokenizer.
      prompt: a string, token ids, or a conversation with chat=True.
      **options: those of `specjax.generate`, except n and slots.

    Returns:
      A `Stream`; nothing is computed before the first ``next``, but every option is checked here.

    Raises:
      ValueError, TypeError: as `specjax.generate`; more than one prompt; a model without tokenizer.
    """
    if checked("lm", lm).tokenizer is None:
        raise ValueError("stream yields text, but this model has no tokenizer: use generate with token ids")
    made = request.make(lm, prompt, **options)
    if made is None or made.keys.shape[0] != 1:
        raise ValueError("stream takes one prompt and one sample of it: use generate for several")
    return Stream(Rounds(made, lm.tokenizer))

