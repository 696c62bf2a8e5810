"""From a target's own text to a head on disk that is accepted more often than before and changes no text."""

import jax
import numpy as np
import pytest

import specjax
from specjax import LanguageModel
from specjax.drafters.checkpoint import load_drafter, save_drafter
from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.nnx import from_nnx
from specjax.train import heads, initial, students, trainer
from specjax.train.evaluate import Prompt, evaluate
from specjax.train.report import report
from specjax.train.settings import Settings
from specjax.train.types import Batch

V, WIDTH, ROWS = 32, 24, 16


def world() -> LanguageModel:
    """A target with random but decided opinions."""
    config = LlamaConfig(V, 32, 48, 2, 4, 4, max_position_embeddings=128)
    model, params = from_nnx(llama.Llama(config))
    params = jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, params)
    return LanguageModel(model, {**params, "embedding": params["embedding"] * 5}, config=config)


@pytest.mark.full
def test_a_head_learns_to_be_accepted_and_stays_lossless(tmp_path):
    target = world()
    begun = [[int(token)] for token in np.random.default_rng(0).integers(0, V, 256)]
    own = np.asarray(specjax.generate(target, begun, max_new_tokens=WIDTH, temperature=1.0, seed=1).tokens, np.int32)

    def batches(step):
        tokens = own[np.random.default_rng([3, step]).integers(0, len(own), ROWS)]
        return Batch(tokens, np.ones(tokens.shape, bool))

    config = initial.config_for("eagle", target, num_draft_tokens=3)
    start = initial.params_for(config, target)
    prompts = [Prompt([1 + i]) for i in range(16)]

    def look(step, params):
        drafter = heads.drafter(config, params, target, num_draft_tokens=3)
        return evaluate(target, drafter, prompts, max_new_tokens=16, batch=16, temperatures=(0.0, 1.0))

    settings = Settings(steps=120, learning_rate=3e-3, log_every=20, eval_every=60, save_every=60)
    loss, how = students.head_loss(config, target, depth=2), {"given": target.params, "progress": False}
    fitted = trainer.fit(loss, start, batches, settings, **how, directory=tmp_path / "run", evaluate=look)
    alpha = fitted.history["alpha"]
    assert alpha[-20:].mean() > alpha[:5].mean() + 0.1
    before, middle, after = ({row["temperature"]: row["tau"] for row in line["evaluation"]}
                             for line in fitted.evaluations)  # fmt: skip
    assert all(after[t] > before[t] + 0.1 for t in (0.0, 1.0)) and set(middle) == {0.0, 1.0}

    save_drafter(tmp_path / "head", config, fitted.params)
    drafter = load_drafter(tmp_path / "head", target, num_draft_tokens=3)
    (row,) = evaluate(target, drafter, prompts, max_new_tokens=16, batch=16, compare=True)
    assert row.same == len(prompts) and row.tau == after[0.0]
    pytest.importorskip("matplotlib")
    assert report(tmp_path / "run").name == "train_report.png"
