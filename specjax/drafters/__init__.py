"""Draft sources, one file each."""

from specjax.drafters.cascade import cascade
from specjax.drafters.dflash import DFlashConfig, dflash
from specjax.drafters.eagle import EagleConfig, eagle
from specjax.drafters.host import host
from specjax.drafters.lookahead import lookahead
from specjax.drafters.medusa import MEDUSA_CHOICES, MedusaConfig, blockwise, medusa
from specjax.drafters.model import model
from specjax.drafters.mtp import MTPConfig, mtp
from specjax.drafters.ngram import ngram
from specjax.drafters.recycling import recycling
from specjax.drafters.recycling_files import RecyclingConfig
from specjax.drafters.retokenize import retokenize
from specjax.drafters.suffix import Pool, remember, suffix, suffix_pool
from specjax.drafters.tables import Tables, build_tables, load_tables
from specjax.drafters.translate import translate

__all__ = [
    "MEDUSA_CHOICES", "DFlashConfig", "EagleConfig", "MTPConfig", "MedusaConfig", "Pool", "RecyclingConfig", "Tables",
    "blockwise", "build_tables", "cascade", "dflash", "eagle", "host", "load_tables", "lookahead", "medusa", "model",
    "mtp", "ngram", "recycling", "remember", "retokenize", "suffix", "suffix_pool", "translate",
]  # fmt: skip
