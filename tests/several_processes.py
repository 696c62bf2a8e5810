"""What `test_several_processes` runs, in one process or in each of several: text, a training run, a corpus.

    python -m tests.several_processes DIRECTORY    (with the variables of scripts/devices.py for several)
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from scripts import devices


def text(there):
    """On a mesh of all devices."""
    import specjax
    from specjax import sharding
    from tests import test_sharding as t

    lm = sharding.place(there, t.alone())
    drafter = t.options()["drafter"]
    sampled = {"max_new_tokens": 8, "prefill_chunk": 8, "temperature": 1.0, "drafter": drafter}
    return {
        "greedy": specjax.generate(lm, t.PROMPTS, **t.options()).tokens,
        "slots": specjax.generate(lm, t.PROMPTS, slots=4, **t.options()).tokens,
        "match": specjax.generate(lm, t.PROMPTS, **sampled).tokens,
    }


def work(directory):
    from specjax.train import mesh, trainer
    from tests.train_toy import GIVEN, LOSS, RUN, batches, weights

    there = mesh.make_mesh(2, 2)
    found = text(there)
    run = RUN._replace(steps=4, save_every=2, log_every=2, eval_every=0)
    made = trainer.fit(
        LOSS, weights(), batches, run, given=GIVEN, directory=directory / "run", mesh=there, progress=False,
        evaluate=lambda step, params: {"norm": float(np.linalg.norm(params["w"]))},
    )  # fmt: skip
    found |= {"loss": made.history["loss"].tolist(), "w": np.asarray(made.params["w"]).tolist()}
    found |= {"evaluations": [row["evaluation"] for row in made.evaluations]}
    return found


def main():
    directory = pathlib.Path(sys.argv[1])
    devices.start(argparse.Namespace(multihost=False))
    found = work(directory)  # nothing that computes is imported before
    from specjax.models.load import load
    from specjax.train import data, sources

    target = load(directory / "m.gguf")
    corpus = data.write_corpus(
        target, directory / "corpus", tokens=240, source=sources.SelfSynthesis(turn_tokens=4, answer_tokens=12),
        batch=3, slots=32, shard_size=4, steps=4, progress=False,
    )  # fmt: skip
    found["shards"] = corpus.shards
    print(jax.process_count(), "processes", flush=True)
    if jax.process_index() == 0:
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
