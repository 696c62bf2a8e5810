"""The trainer: gradients are means over all that is learnt, however it is cut; what is frozen stays."""

import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.nnx import from_nnx
from specjax.static import bind
from specjax.train import mesh as meshes
from specjax.train import trainer
from specjax.train.settings import Settings, checked, rate
from specjax.train.types import Mean
from tests.train_toy import GIVEN, LOSS, ROWS, RUN, WIDTH, V, batches, fit, weights


def one(settings, batch, params=None, given=GIVEN, **how):
    """The state and the numbers after one step."""
    state = trainer.start(weights() if params is None else params, settings, **how)
    state, row = trainer.update(LOSS, settings, None, state, given, batch)
    return state, {name: mean.value() for name, mean in jax.device_get(row).means().items()}


def mean_gradient(params, batch):
    """Float64, place by place."""
    w, bias = params["w"].astype(np.float64), params["bias"].astype(np.float64)
    dw, db, count = np.zeros_like(w), np.zeros_like(bias), 0
    for tokens, counts in zip(np.asarray(batch.tokens), np.asarray(batch.counts)):
        for before, token, counted in zip(tokens, tokens[1:], counts[1:]):
            if counted:
                z = w[before] + bias
                slope = np.exp(z) / np.exp(z).sum() - np.eye(V)[token]
                dw[before] += slope
                db += slope
                count += 1
    return dw / count, db / count


# --- one step


@pytest.mark.parametrize("parts", [1, 4])
def test_a_gradient_is_the_mean_over_all_that_is_learnt_however_it_is_cut(parts):
    """Micro-batches of unequal weight, one of them empty. A first Adam step is -rate * g / (|g| + eps): with eps 1 the
    size of the gradient shows."""
    settings = Settings(steps=9, warmup=1, learning_rate=0.1, eps=1.0, clip=100.0, accumulate=parts)
    batch = batches(0)
    batch = batch._replace(counts=batch.counts & (np.arange(ROWS) % 4 != 1)[:, None])
    before = weights()
    state, numbers = one(settings, batch)
    gradients = dict(zip(("w", "bias"), mean_gradient(before, batch)))
    for name, g in gradients.items():
        np.testing.assert_allclose(state.trained[name], before[name] - 0.1 * g / (np.abs(g) + 1), atol=1e-6)
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    np.testing.assert_allclose(numbers["gradient_norm"], norm, rtol=1e-5)
    assert numbers["learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_that_learns_nothing_moves_nothing(parts):
    """Case 129: neither weights nor averages nor the optimiser's slots and count; the loss is 0 and not NaN."""
    settings = Settings(steps=9, weight_decay=0.5, ema=0.9, accumulate=parts)
    before, _ = one(settings, batches(0))  # momentum that would move weights
    kept = jax.tree.map(np.array, before)
    empty = batches(1)._replace(counts=np.zeros((ROWS, WIDTH), bool))
    after, row = trainer.update(LOSS, settings, None, before, GIVEN, empty)
    assert {name: mean.value() for name, mean in row.means().items()}.items() >= {"loss": 0.0, "alpha": 0.0}.items()
    assert (int(kept.step), int(after.step)) == (1, 2)
    for was, now in zip(jax.tree.leaves(kept._replace(step=0)), jax.tree.leaves(after._replace(step=0)), strict=True):
        np.testing.assert_array_equal(was, now)


def test_nothing_frozen_moves_or_has_slots():
    """Case 133: the target's weights, `ids` and a frozen bias stay bit for bit, whatever decays."""
    settings = Settings(steps=9, learning_rate=0.1, weight_decay=0.5, ema=0.5)
    given = {**GIVEN, "target": jnp.arange(5.0)}
    state, _ = one(settings, batches(0), given=given, frozen=("ids", "bias", "absent"))
    assert {leaf.shape for leaf in jax.tree.leaves(state.slots)} == {(), (V, V)}
    assert state.ema is not None and state.ema.keys() == state.trained.keys() == {"w"}
    assert not np.array_equal(state.trained["w"], weights()["w"])
    for name in ("ids", "bias"):
        np.testing.assert_array_equal(state.frozen[name], weights()[name])
    np.testing.assert_array_equal(given["target"], np.arange(5.0))


def test_bfloat16_is_what_the_loss_sees_and_masters_stay_float32():
    """Steps of 1e-4 from 1.0 would be lost in bfloat16, whose next number is 1.0078."""
    settings = Settings(steps=9, learning_rate=1e-4, warmup=1, ema=0.5, dtype="bfloat16")
    params = {"w": jnp.ones((V, V), jnp.bfloat16), "bias": np.ones(V, np.float32), "ids": np.arange(3)}
    state, _ = one(settings, batches(0), params, {"dtype": jnp.zeros((), jnp.bfloat16)})  # the loss asserts it
    floats = [x for x in jax.tree.leaves((state.trained, state.slots, state.ema)) if x.dtype != jnp.int32]
    assert len(floats) == 8 and all(leaf.dtype == jnp.float32 for leaf in floats)
    moved = np.abs(np.asarray(state.trained["w"], np.float64) - 1)
    assert 0 < moved.max() < 2e-4


def test_averages_follow_the_weights():
    settings = Settings(steps=9, learning_rate=0.1, ema=0.9)
    state = trainer.start(weights(), settings)
    average = weights()["w"].astype(np.float64)
    for step in range(3):
        state, _ = trainer.update(LOSS, settings, None, state, GIVEN, batches(step))
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * np.asarray(state.trained["w"], np.float64)
    np.testing.assert_allclose(state.ema["w"], average, atol=1e-6)


def test_what_is_computed_anew_is_the_same():
    settings = Settings(steps=9)
    (plain, _), (again, _) = one(settings, batches(0)), one(settings._replace(remat=True), batches(0))
    np.testing.assert_allclose(again.trained["w"], plain.trained["w"], atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(schedule):
    rates = [float(rate(Settings(100, 0.5, schedule=schedule, floor=0.1))(step)) for step in range(101)]
    assert rates[:5] == pytest.approx([0.125, 0.21875, 0.3125, 0.40625, 0.5])
    assert all(a > b for a, b in itertools.pairwise(rates[4:])) and rates[100] == pytest.approx(0.05)
    middle = 0.05 + 0.45 * (0.5 if schedule == "cosine" else 52 / 96)
    assert rates[52 if schedule == "cosine" else 48] == pytest.approx(middle, abs=1e-6)


def test_a_run_compiles_one_program_and_looks_at_its_numbers_now_and_then(monkeypatch):
    looks, device_get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: looks.append(tree) or device_get(tree))
    settings, before = Settings(steps=40, learning_rate=0.3, log_every=16), trainer.update._cache_size()
    fitted = trainer.fit(LOSS, weights(), batches, settings, given=GIVEN, progress=False)
    trainer.fit(LOSS, weights(), batches, settings._replace(log_every=40, keep=9), given=GIVEN, progress=False)
    assert trainer.update._cache_size() == before + 1 and len(looks) == 3 + 1
    assert fitted.history["step"].tolist() == list(range(1, 41))
    assert fitted.history["loss"][-8:].mean() < fitted.history["loss"][:8].mean() - 0.1
    np.testing.assert_array_equal(fitted.params["ids"], weights()["ids"])


# --- several devices


SHAPES = [(8, 1), (2, 4), *(pytest.param(shape, marks=pytest.mark.full) for shape in ((1, 1), (1, 8)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_devices_share_a_batch_and_change_no_number(shape):
    settings = Settings(steps=6, learning_rate=0.1, accumulate=2, ema=0.5, log_every=6)
    mesh = meshes.make_mesh(*shape)
    batch = meshes.share(mesh, batches(0), 2)
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(ROWS // shape[0], WIDTH)}
    state, given = (meshes.spread(mesh, tree) for tree in (trainer.start(weights(), settings), GIVEN))
    program = trainer.update.lower(LOSS, settings, mesh, state, given, batch).compile().as_text()
    assert f"s32[{ROWS // shape[0]},{WIDTH}]" in program
    assert (f"s32[{ROWS},{WIDTH}]" in program) == (shape[0] == 1) == ("all-reduce" not in program)
    assert "all-gather" not in program
    alone = trainer.fit(LOSS, weights(), batches, settings, given=GIVEN, progress=False)
    shared = trainer.fit(LOSS, weights(), batches, settings, given=GIVEN, progress=False, mesh=mesh)
    for name in ("loss", "gradient_norm"):  # Adam's steps hide how large a gradient is
        np.testing.assert_allclose(shared.history[name], alone.history[name], rtol=1e-6)
    for name in ("w", "bias"):
        there = shared.params[name].sharding
        assert there.is_fully_replicated and len(there.device_set) == mesh.size
        np.testing.assert_allclose(shared.params[name], alone.params[name], atol=1e-6)
        np.testing.assert_allclose(shared.ema[name], alone.ema[name], atol=1e-6)


TINY = LlamaConfig(48, 16, 32, 2, 4, 4)


def distil(model, params, given, batch, key):
    """A linear head learns a target's laws."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32)[None], batch.tokens.shape)
    out = jax.lax.stop_gradient(model.apply(given, batch.tokens, positions, None, None, feature_layers=(2,)))
    said = jax.nn.log_softmax(out.features @ params["head"].T)
    counts = batch.counts.astype(jnp.float32)
    total = -((jax.nn.softmax(out.logits) * said).sum(-1) * counts).sum()
    return total, {"loss": Mean(total, counts.sum())}


@pytest.mark.parametrize("shape", [(2, 4), *(pytest.param(s, marks=pytest.mark.full) for s in ((8, 1), (1, 8)))])
def test_a_target_shared_out_over_devices_says_the_same(shape):
    """Its large matrices lie in parts, where `place_target` has put them, and no part moves. So do those of a head."""
    model, params = from_nnx(llama.Llama(TINY))
    settings, head = Settings(steps=2, log_every=2), {"head": np.zeros((48, 16), np.float32)}
    mesh, loss, model_parts = meshes.make_mesh(*shape), bind(distil, model), shape[1]
    placed = meshes.place_target(mesh, params)
    layer = placed["layers"][0]
    assert layer["qkv"].sharding.spec == PartitionSpec("model", None) and layer["post_norm"].is_fully_replicated
    assert {s.data.shape for s in layer["down"].addressable_shards} == {(16, 32 // model_parts)}
    assert {s.data.shape for s in placed["embedding"].addressable_shards} == {(48 // model_parts, 16)}
    spread = meshes.spread(mesh, placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(placed), strict=True))
    alone = trainer.fit(loss, head, batches, settings, given=params, progress=False)
    shared = trainer.fit(loss, head, batches, settings, given=placed, progress=False, mesh=mesh)
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(shared.history[name], alone.history[name], rtol=1e-5)
    assert {s.data.shape for s in shared.params["head"].addressable_shards} == {(48 // model_parts, 16)}
    np.testing.assert_allclose(shared.params["head"], alone.params["head"], atol=1e-5)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps=0: must be a whole number, 1 or more"), ({"steps": 2.5}, "steps=2.5"),
        ({"learning_rate": 0}, "learning_rate=0: must be more than 0"), ({"learning_rate": "x"}, "learning_rate='x'"),
        ({"learning_rate": math.inf}, "learning_rate=inf"), ({"ema": 1.0}, "ema=1.0: must be 0 or more and less than"),
        ({"b2": -0.1}, "b2=-0.1"), ({"clip": math.nan}, "clip=nan"), ({"floor": 1.5}, "floor=1.5: .* at most 1"),
        ({"schedule": "step"}, "schedule='step': choose 'cosine' or 'linear'"), ({"dtype": "f32"}, "dtype='f32'"),
        ({"warmup": 12}, "warmup=12: must be fewer than steps=12"), ({"accumulate": 0}, "accumulate=0"),
        ({"keep": 0}, "keep=0"), ({"log_every": 0}, "log_every=0"), ({"eval_every": -1}, "eval_every=-1"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        checked(RUN._replace(**changes))


def no_mean(params, given, batch, key):
    return params["w"].sum(), {"loss": params["w"].sum()}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"settings": 5}, "settings=5: give specjax.train.Settings"),
        ({"params": [1]}, r"params=\[1\]: give a dict"),
        ({"frozen": ("w", "bias", "ids")}, "nothing to train"),
        ({"frozen": ()}, r"params\['ids'\] holds int\d+: name it in frozen=\(\)"),
        ({"batches": [batches(0)]}, "batches ended after 1 of 12 steps"),
        ({"settings": RUN._replace(accumulate=3)}, r"shape \(16, 5\): the first axis must be a multiple"),
        ({"mesh": "x"}, "mesh='x': must have the automatic axes"),
        ({"directory": ""}, "directory='': give the directory"),
        ({"loss": bind(no_mean)}, "no Mean called 'loss'"),
    ],
)  # fmt: skip
def test_calls_that_make_no_sense_are_refused(how, words):
    call = {"loss": LOSS, "params": weights(), "batches": batches, "settings": RUN, "given": GIVEN, "progress": False}
    with pytest.raises(ValueError, match=words):
        trainer.fit(**{**call, **how})


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    for name in ("tqdm", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"tqdm: pip install '\.\[train\]' in the clone, or progress=False"):
        fit(None, progress=True)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        fit(tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="16 devices, there are 8"):
        meshes.make_mesh(2, 8)
    with pytest.raises(ValueError, match="multiple of accumulate=2 times 8 devices"):
        meshes.share(meshes.make_mesh(8), batches(0).tokens[:8], 2)
