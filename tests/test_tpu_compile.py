"""What the TPU's own compiler makes of a round, for one chip and for eight; no TPU is needed."""

import importlib.util

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from specjax.models.config import LlamaConfig
from tests.conftest import ROOT

FORBIDDEN = ("callback", "infeed", "outfeed")


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs for chips that are not there can be written to the cache and not read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.full
@pytest.mark.parametrize("topology, chips", [("v5e:1x1", 1), ("v5e:2x4", 8)])
def test_a_round_on_a_tpu_stays_there_and_updates_its_cache_in_place(topology, chips):
    spec = importlib.util.spec_from_file_location("tpu_report", ROOT / "scripts" / "tpu_report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    config = LlamaConfig(512, 256, 512, 2, 8, 8, head_dim=128)
    compiled = report.Programs(report.mesh_of(topology, 1), config, k=3, batch=8).round()
    text, cost = compiled.as_text(), report.cost_of(compiled)
    assert not [word for word in FORBIDDEN if word in text]
    cache = 2 * 2 * 8 * (8 // chips) * report.SLOTS * 128 * 2  # k and v, layers, rows, heads, slots, channels, bytes
    assert cost.aliased >= cache and "input_output_alias" in text.splitlines()[0]
    assert bool(cost.collectives) == (chips > 1)
    # No layer of the cache crosses from chip to chip, and no [B, T, V] of logits is gathered.
    assert sum(cost.collectives.values()) < cache // 4 and cost.collectives.get("all-gather", 0) < 8 * 4 * 512 * 4
