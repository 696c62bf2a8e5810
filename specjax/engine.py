"""Continuous use of slots: a queue of requests that keeps a batch of fixed shape full.

The arrays and the compiled programs are in `specjax.slots`; here is the queue, and what each request has said so far.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import loop, noise, options, processes, request
from specjax import slots as compiled
from specjax.accept import Rule
from specjax.adaptive import Policy
from specjax.models.language_model import LanguageModel, checked
from specjax.queued import Event, Job, Sizes, jobs, joined, own_limits, own_sampling
from specjax.request import Request
from specjax.result import Generation
from specjax.round import LENGTH, RUNNING, no_limits
from specjax.slots import Reading, Slots, Step
from specjax.static import show, whole
from specjax.types import Drafter, Text

# Options of `generate` that an Engine has once and for all.
FIXED = ("drafter", "rule", "logprobs", "prefill_chunk", "adaptive")


class Engine:
    """A fixed number of slots that requests pass through.

    `insert` queues a request, `step` runs one round of all slots and returns what came of it, `remove` cancels. While
    rows decode, one chunk of one waiting prompt is read between two rounds. When a text ends, its slot goes to the
    next request whose prompt has been read. Shapes never change, so nothing is compiled after the first requests.

    The text of a request depends on its prompt, seed and options, as with `specjax.generate`: never on its slot, on
    its neighbours or on when it was inserted. Greedy (float32) and under rule "match" it is the text of `generate`,
    token for token; the other rules keep its law, and with ``adaptive`` that is all that they keep.

        engine = specjax.Engine(lm, slots=8, capacity=512, drafter=specjax.drafters.ngram())
        engine.insert("Why is the sky blue?", chat=True, max_new_tokens=64)
        for event in engine.events():
            print(event.id, event.text, event.result)
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        slots: int,
        capacity: int,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        logprobs: bool = False,
        prefill_chunk: int = 64,
        max_eos_ids: int = 8,
        max_stop_sequences: int = 4,
        max_stop_tokens: int = 8,
        max_biases: int = 32,
        adaptive: bool | Policy = False,
    ):
        """Allocates the slots.

        Args:
          lm: what `specjax.load` returned, or ``LanguageModel(model, params)`` around your own.
          slots: requests that decode at the same time.
          capacity: longest text in tokens, prompt and new ones together; every slot has memory for it, and the prompt
            that is being read too.
          drafter: a draft source; None decodes plainly. None that runs Python between rounds (`specjax.drafters.host`).
          rule, logprobs: as for `specjax.generate`.
          prefill_chunk: prompt tokens per forward pass; rows that decode wait for one such pass.
          max_eos_ids: most ids that end a text, per request.
          max_stop_sequences, max_stop_tokens: most token sequences that end a text, and tokens of the longest.
          max_biases: most tokens with a bias or ban.
          adaptive: as for `specjax.generate`: before every round one number of draft tokens for all slots, by what a
            batch of that many rows costs. What past texts accepted counts for those that follow.

        Raises:
          ValueError: an argument that cannot be honoured; names it, its value and the remedy.
        """
        self.slots = whole("slots", slots, 1, "; 4 to 64 is usual")
        self._lm, self._drafter = checked("lm", lm), drafter  # the programs hold their functions weakly
        self._fixed: dict[str, Any] = {
            "drafter": drafter, "rule": rule, "logprobs": logprobs, "prefill_chunk": prefill_chunk
        }  # fmt: skip
        made = self._nothing(1)
        if made.host is not None:
            raise ValueError(
                "drafter runs Python between rounds, as drafters.host and drafters.retokenize do, which slots cannot: "
                "use specjax.generate without slots, or a drafter that is compiled"
            )
        self.capacity = whole("capacity", capacity, 1, "; the tokens of the longest text")
        limit = min((x for x in (lm.model.context_length, made.program.drafter.context_length) if x), default=None)
        if limit is not None and self.capacity > limit:
            raise ValueError(f"capacity={self.capacity}: texts of this model and drafter have at most {limit} tokens")
        longest = self.capacity + 1 + made.program.drafter.num_draft_tokens
        self._chunk = min(int(prefill_chunk), loop.capacity(longest, 1))
        self._sizes = Sizes(
            loop.capacity(longest, self._chunk), self.capacity,
            whole("max_eos_ids", max_eos_ids, 1), whole("max_stop_sequences", max_stop_sequences, 1),
            whole("max_stop_tokens", max_stop_tokens, 1), whole("max_biases", max_biases, 1),
        )  # fmt: skip
        compiled.check_rows(made.program, made.weights, self._sizes.width)
        made = self._nothing(self.slots, adaptive=adaptive)  # last, for it may measure
        self._program, self._weights = made.program, made.weights
        self._state = self._empty(made)
        self._ends = jnp.asarray(options.padded_ids(options.eos(lm.eos_ids, lm.model.vocab_size)))
        self._jobs: list[Job | None] = [None] * self.slots
        self._dropped = np.zeros(self.slots, bool)
        self._queue: deque[Job] = deque()
        self._next: tuple[Job, Reading, int] | None = None  # the prompt that is being read, and how many chunks were
        self._step: Step | None = None  # a round whose result has not arrived
        self._events: list[Event] = []  # not yet returned
        self._count = 0

    def _nothing(self, rows: int, **policy: Any) -> Request:
        """A request for no text: what is asked for is the program, and the costs of so many rows."""
        made = request.make(
            self._lm, [[0]] * rows, max_new_tokens=0, on_capacity="truncate", **self._fixed, **policy
        )
        assert made is not None
        return made

    def _empty(self, made: Request) -> Slots:
        rows, vocab, sizes = self.slots, self._lm.model.vocab_size, self._sizes
        text = Text(jnp.zeros((rows, sizes.width), jnp.int32), jnp.ones(rows, jnp.int32), jnp.ones(rows, jnp.int32))
        keys = jax.random.key_data(noise.row_keys([0] * rows))
        given = jax.device_get((options.make_sampling(rows, vocab), no_limits(0, rows)))
        asked = jax.tree.map(jnp.asarray, (own_sampling(given[0], sizes, vocab), own_limits(given[1], sizes)))
        return compiled.empty(self._program.prefill(), self._weights, text, keys, made.first_pace(), *asked)

    # --- what can be seen

    @property
    def in_use(self) -> int:
        """Slots that hold a request."""
        return sum(job is not None for job in self._jobs)

    @property
    def waiting(self) -> int:
        """Requests without a slot, the one whose prompt is being read included."""
        return len(self._queue) + (self._next is not None)

    def __repr__(self) -> str:
        return f"Engine({self.in_use} of {self.slots} slots in use, {self.waiting} waiting, capacity {self.capacity})"

    # --- what can be asked

    def insert(self, prompt: Any, **options: Any) -> int:
        """Queues a request and returns its id. Nothing is computed before the next `step`.

        Args:
          prompt: a string, token ids, or a conversation with chat=True.
          **options: those of `specjax.generate` for one prompt: max_new_tokens, seed, eos_ids, stop, chat, on_capacity,
            and the sampling options. n is 1; drafter, rule, logprobs, prefill_chunk and adaptive are the engine's.

        Raises:
          ValueError: an option or prompt that cannot be honoured; a text that may outgrow the capacity; more end ids,
            stop sequences or biases than there is room for.
          TypeError: an unknown option, or one that is the engine's.
        """
        made = self._make(prompt, options)
        if made is None or made.keys.shape[0] != 1:
            raise ValueError("insert takes one prompt and one sample of it: call it once for each, or use run")
        return self.submit(made, options.get("on_capacity", "error"))[0]

    def remove(self, id: int) -> Generation:
        """Cancels a request and returns what it has said; its slot is free for the next one.

        Raises:
          ValueError: no such request is waiting or running.
        """
        job = self._take_out(id)
        if job is None:
            raise ValueError(f"id={show(id)}: no such request is waiting or running")
        return job.result()

    def step(self) -> list[Event]:
        """Reads at most one chunk of a waiting prompt, fills free slots and runs one round of all of them.

        While no slot is in use there is nobody to hold up, and chunks are read until one is.

        Returns:
          An `Event` for every request that got tokens or ended. [] while the engine has nothing to do.
        """
        if self._step is None:  # else an interrupt came between the last round and its result
            self._admit()
            if self.in_use:
                self._state, self._step = compiled.step(
                    self._program, self._weights, self._state, self._dropped, self._ends
                )
                self._dropped = np.zeros(self.slots, bool)  # only now: an interrupt must not forget them
        if self._step is not None:
            info, self._step = processes.fetch(self._step), None
            for slot, job in enumerate(self._jobs):
                if job is not None:
                    self._events.append(job.take(slot, info))
                    if job.finish != RUNNING:
                        self._free(slot)
        events, self._events = self._events, []
        return events

    def events(self) -> Iterator[Event]:
        """Steps until nothing is waiting or running. Requests may be inserted and removed meanwhile."""
        while self.in_use or self.waiting or self._events:
            yield from self.step()

    def run(self, prompts: Any, **options: Any) -> Generation:
        """`specjax.generate` through the slots: the prompts are queued, and the result is that of generate.

        Events of requests that were inserted before are kept for the next `step`.

        Args:
          prompts: as for `specjax.generate`.
          **options: those of `specjax.generate`, except those that are the engine's.

        Raises:
          ValueError, TypeError: as `insert`.
        """
        made = self._make(prompts, options)
        return self.finish([] if made is None else self.submit(made, options.get("on_capacity", "error")))

    # --- requests

    def _make(self, prompts: Any, given: Mapping[str, Any]) -> Request | None:
        for name in FIXED:
            if name in given:
                raise TypeError(f"{name} is fixed when an Engine is made: pass it to Engine(...)")
        return request.make(self._lm, prompts, **self._fixed, **given)

    def submit(self, made: Request, on_capacity: str = "error") -> list[int]:
        """Queues the rows of a checked request for the same model, drafter and rule; returns their ids."""
        added = jobs(made, self._count, self._sizes, on_capacity, self._lm.tokenizer)
        self._count += len(added)
        for job in added:
            if job.row.limits.max_new_tokens[0]:
                self._queue.append(job)
            else:
                job.finish = LENGTH
                self._events.append(job.event())
        return [job.id for job in added]

    def finish(self, ids: Sequence[int]) -> Generation:
        """Steps until these requests have ended; their results as one, in this order."""
        wanted, done, others = set(ids), dict[int, Generation](), []
        try:
            while len(done) < len(wanted):
                for event in self.step():
                    if event.id not in wanted:
                        others.append(event)
                    elif event.result is not None:
                        done[event.id] = event.result
        finally:
            self._events = others + self._events
            for id in ids:
                self._take_out(id)  # nothing, unless interrupted
        results = [done[id] for id in ids]
        program, texts = self._program, self._lm.tokenizer is not None
        return joined(results, program.drafter.num_draft_tokens, program.logprobs, texts)

    # --- slots

    def _admit(self) -> None:
        """Reads chunks and fills slots: one chunk if others decode, else until the first prompt is in its slot."""
        self._place()
        while True:
            if self._next is None and self._queue:
                job = self._queue[0]
                text, key_data = jax.tree.map(jnp.asarray, (job.row.text, job.row.key_data))
                reading = compiled.begin(self._program.prefill(), self._weights, text, key_data)
                self._next = job, reading, 0
                self._queue.popleft()
            if self._next is None or self._read_all():
                return
            job, reading, index = self._next
            reading = compiled.read(
                self._program.prefill(), self._weights, reading, np.int32(index), chunk=self._chunk
            )
            self._next = job, reading, index + 1
            self._place()
            if self.in_use:
                return

    def _read_all(self) -> bool:
        return self._next is not None and self._next[2] * self._chunk >= self._next[0].prompt_length

    def _place(self) -> None:
        """Puts a prompt that has been read into a free slot, if there are both."""
        if self._next is None or not self._read_all() or None not in self._jobs:
            return
        job, reading, _ = self._next
        slot = self._jobs.index(None)
        row = Slots(reading.state, job.row.sampling, job.row.limits)
        self._state = compiled.insert(self._state, np.int32(slot), row, layout=self._program.model.layout)
        self._jobs[slot], self._dropped[slot], self._next = job, False, None

    def _free(self, slot: int) -> None:
        """The request of a slot has ended or is no longer wanted."""
        self._jobs[slot], self._dropped[slot] = None, True

    def _take_out(self, id: int) -> Job | None:
        for slot, job in enumerate(self._jobs):
            if job is not None and job.id == id:
                self._free(slot)
                return job
        if self._next is not None and self._next[0].id == id:
            job, self._next = self._next[0], None
            return job
        for job in self._queue:
            if job.id == id:
                self._queue.remove(job)
                return job
        return None


def for_request(lm: LanguageModel, made: Request, slots: int, **fixed: Any) -> Engine:
    """An engine just large enough for a checked request; ``fixed`` are the options of `Engine` that it shares."""
    longest = np.max(np.asarray(made.text.lengths) + np.asarray(made.limits.max_new_tokens))
    eos_ids, biases = made.sampling.eos_ids.shape[0], made.sampling.bias_ids.shape[1]
    height, width = made.limits.stop_sequences.shape
    return Engine(
        lm, slots=min(slots, made.keys.shape[0]), capacity=max(1, int(longest)), max_eos_ids=eos_ids,
        max_stop_sequences=max(4, height), max_stop_tokens=max(8, width), max_biases=max(32, biases), **fixed,
    )  # fmt: skip
