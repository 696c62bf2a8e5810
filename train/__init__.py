"""Training drafters: losses, teacher-forced heads, a small training loop. Imported as ``specjax.train``.

The directory is ``train/`` at the top of the repository; ``specjax/train`` is a link to it.
"""

from specjax.train.distill import Batch, Optimiser, fit, head_loss
from specjax.train.initial import config_for, params_for
from specjax.train.losses import acceptance, distillation_loss

__all__ = [
    "Batch", "Optimiser", "acceptance", "config_for", "distillation_loss", "fit", "head_loss", "params_for",
]  # fmt: skip
