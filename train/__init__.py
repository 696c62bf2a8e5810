"""Training drafters: losses so far. Imported as ``specjax.train``.

The directory is ``train/`` at the top of the repository; ``specjax/train`` is a link to it.
"""

from specjax.train.losses import acceptance, distillation_loss

__all__ = ["acceptance", "distillation_loss"]
