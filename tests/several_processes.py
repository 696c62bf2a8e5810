"""What `test_several_processes` runs, in one process or in each of several: an evaluation by script, text, a training
run, a corpus.

    python -m tests.several_processes DIRECTORY    (with the variables of scripts/devices.py for several)
"""

import json
import pathlib
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
TARGET, HEAD = DATA / "tiny_models" / "llama_tied_sharded", DATA / "tiny_drafters" / "eagle3_llama_tied"


def evaluate(directory):
    """`scripts/eval_drafter.py`, which joins the processes: nothing that computes comes before. The head brings a copy
    of the target's embedding, which lies in parts."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import eval_drafter

    line = f"- {directory / 'prompts.jsonl'} --model {TARGET} --drafter {HEAD} --mesh 2,2 --batch 2 --max-new-tokens 6"
    sys.argv = [*line.split(), "--json", str(directory / "worth.json")]
    eval_drafter.main()


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


def compared(there):
    """What each process says of copies of a weight of which it holds one half."""
    from specjax import processes, sharding
    from specjax.models.identity import equal

    own = np.arange(64, dtype=np.float32).reshape(8, 8)
    embedding = sharding.place_params(there, {"embedding": own})["embedding"]
    assert sorted({shard.data.shape for shard in embedding.addressable_shards}) == [(2, 8)]
    return [processes.each(int(equal(embedding, copy))) for copy in (own, own + (own == 7), own + (own == 0))]


def work(directory):
    from specjax.train import mesh, trainer
    from tests.train_toy import GIVEN, LOSS, RUN, batches, weights

    there = mesh.make_mesh(2, 2)
    found = text(there) | {"equal": compared(mesh.make_mesh(1, 4))}
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
    evaluate(directory)
    found = work(directory)
    from specjax.models.load import load
    from specjax.train import data, mesh, sources

    target = load(directory / "m.gguf", mesh=mesh.make_mesh(2, 2))
    corpus = data.write_corpus(
        target, directory / "corpus", tokens=240, source=sources.SelfSynthesis(turn_tokens=4, answer_tokens=12),
        batch=4, slots=32, shard_size=4, steps=4, progress=False,
    )  # fmt: skip
    found["shards"] = corpus.shards
    print(jax.process_count(), "processes", flush=True)
    if jax.process_index() == 0:
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
