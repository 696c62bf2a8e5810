"""Training drafters. Imported as ``specjax.train``.

The directory is ``train/`` at the top of the repository; ``specjax/train`` is a link to it. From a target to a drafter:

    sources, generate, data   text of the target's own with its laws, in shards
    packing, features         rows of several texts, batches by number; the target's hidden states on disk
    tables                    the student that needs no gradient
    initial, draft_lm         students to start from
    losses, heads, students   what they are trained for
    settings, trainer         the training loop; mesh, saving and monitor belong to it
    evaluate, report          what a drafter is worth, by decoding; a picture of a run
"""

from specjax.train.data import Corpus, read_corpus, write_corpus
from specjax.train.draft_lm import on_policy, prune
from specjax.train.initial import config_for, params_for
from specjax.train.mesh import make_mesh, place_target
from specjax.train.packing import batches, pack, texts_of, vocabulary
from specjax.train.settings import Settings
from specjax.train.sources import Prompts, SelfSynthesis, Text
from specjax.train.students import draft_lm_loss, head_loss
from specjax.train.trainer import Fitted, fit
from specjax.train.types import Batch, Mean

__all__ = [
    "Batch", "Corpus", "Fitted", "Mean", "Prompts", "SelfSynthesis", "Settings", "Text", "batches", "config_for",
    "draft_lm_loss", "fit", "head_loss", "make_mesh", "on_policy", "pack", "params_for", "place_target", "prune",
    "read_corpus", "texts_of", "vocabulary", "write_corpus",
]  # fmt: skip
