"""The trainer: gradients are means over all that is learnt, however it is cut; what is frozen stays; runs go on."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
from specjax.train import monitor, trainer
from specjax.train.settings import Settings, checked, rate
from specjax.train.types import Batch, Mean

V, ROWS, WIDTH = 7, 16, 5
BAD = 99  # a token that makes the loss infinite


def toy(params, given, batch, key):
    """Softmax regression on the token before, plus noise that a step must draw anew: sums, not divided."""
    del key
    assert params["w"].dtype == given["dtype"].dtype
    x = jax.nn.one_hot(batch.tokens[:, :-1], V, dtype=params["w"].dtype)
    said = jax.nn.log_softmax((x @ params["w"]).astype(jnp.float32) + params["bias"].astype(jnp.float32)[None, None])
    right = jnp.take_along_axis(said, batch.tokens[:, 1:, None] % V, axis=-1)[..., 0]
    counts = batch.counts[:, 1:].astype(jnp.float32)
    total = -(right * counts).sum() * jnp.where((batch.tokens == BAD).any(), jnp.inf, 1.0)
    measured = {"loss": Mean(total, counts.sum()), "alpha": Mean((jnp.exp(right) * counts).sum(), counts.sum())}
    return total, measured


LOSS = bind(toy)
GIVEN = {"dtype": jnp.zeros((), jnp.float32)}


def weights():
    rng = np.random.default_rng(3)
    return {"w": rng.normal(size=(V, V)).astype(np.float32), "bias": np.zeros(V, np.float32), "ids": np.arange(3)}


def batches(step):
    rng = np.random.default_rng([7, step])
    tokens = rng.integers(0, V, (ROWS, WIDTH)).astype(np.int32)
    return Batch(tokens, (rng.random((ROWS, WIDTH)) < rng.random((ROWS, 1))).astype(bool))


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


@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_devices_share_a_batch_and_change_no_number(shape):
    settings = Settings(steps=6, learning_rate=0.1, accumulate=2, ema=0.5, log_every=6)
    mesh = meshes.make_mesh(*shape)
    batch = meshes.share(mesh, batches(0), 2)
    assert {shard.data.shape for shard in batch.tokens.addressable_shards} == {(ROWS // shape[0], WIDTH)}
    state, given = (meshes.spread(mesh, tree) for tree in (trainer.start(weights(), settings), GIVEN))
    program = trainer.update.lower(LOSS, settings, mesh, state, given, batch).compile().as_text()
    assert f"s32[{ROWS // shape[0]},{WIDTH}]" in program and f"s32[{ROWS},{WIDTH}]" not in program
    assert "all-reduce" in program and "all-gather" not in program
    alone = trainer.fit(LOSS, weights(), batches, settings, given=GIVEN, progress=False)
    shared = trainer.fit(LOSS, weights(), batches, settings, given=GIVEN, progress=False, mesh=mesh)
    np.testing.assert_allclose(shared.history["loss"], alone.history["loss"], rtol=1e-6)
    for name in ("w", "bias"):
        assert shared.params[name].sharding.is_fully_replicated and len(shared.params[name].sharding.device_set) == 8
        np.testing.assert_allclose(shared.params[name], alone.params[name], atol=1e-6)
        np.testing.assert_allclose(shared.ema[name], alone.ema[name], atol=1e-6)


TINY = LlamaConfig(48, 16, 32, 2, 4, 4)


def distil(model, params, given, batch, key):
    """A linear head learns a target's laws."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32)[None], batch.tokens.shape)
    out = jax.lax.stop_gradient(model.apply(given, batch.tokens, positions, None, None, feature_layers=(2,)))
    said = jax.nn.log_softmax(out.features @ params["head"])
    counts = batch.counts.astype(jnp.float32)
    total = -((jax.nn.softmax(out.logits) * said).sum(-1) * counts).sum()
    return total, {"loss": Mean(total, counts.sum())}


def test_a_target_shared_out_over_devices_says_the_same():
    """Its large matrices lie in parts, where `place_target` has put them, and no part moves."""
    model, params = from_nnx(llama.Llama(TINY))
    settings, head = Settings(steps=2, log_every=2), {"head": np.zeros((16, 48), np.float32)}
    mesh, loss = meshes.make_mesh(2, 4), bind(distil, model)
    placed = meshes.place_target(mesh, params)
    layer = placed["layers"][0]
    assert layer["qkv"].sharding.spec == PartitionSpec(None, "model") and layer["post_norm"].is_fully_replicated
    assert {s.data.shape for s in layer["down"].addressable_shards} == {(8, 16)}
    assert {s.data.shape for s in placed["embedding"].addressable_shards} == {(16, 12)}
    spread = meshes.spread(mesh, placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(placed), strict=True))
    alone = trainer.fit(loss, head, batches, settings, given=params, progress=False)
    shared = trainer.fit(loss, head, batches, settings, given=placed, progress=False, mesh=mesh)
    np.testing.assert_allclose(shared.history["loss"], alone.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(shared.params["head"], alone.params["head"], atol=1e-5)


# --- runs that go on

RUN = Settings(steps=12, learning_rate=0.1, log_every=3, save_every=4, eval_every=6, keep=2)


class Stopped(Exception):
    pass


def stopping(step, at=7):
    if step == at:
        raise Stopped
    return batches(step)


def fit(directory, settings=RUN, source=batches, params=None, **how):
    how = {"given": GIVEN, "progress": False, "evaluate": lambda step, params: {"tau": float(step)}, **how}
    return trainer.fit(LOSS, weights() if params is None else params, source, settings, directory=directory, **how)


def numbers(history):
    return {name: column for name, column in history.items() if name != "seconds"}


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accumulate": 2}])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, changes):
    settings = RUN._replace(**changes)
    whole = fit(None, settings)
    with pytest.raises(Stopped):
        fit(tmp_path / "cut", settings, stopping)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    assert [row["step"] for row in monitor.read(metrics)] == [0, 1, 2, 3, 4, 5, 6, 6]  # two are ahead of checkpoint 4
    metrics.write_text(metrics.read_text() + '{"step": 7, "los')
    went_on = fit(tmp_path / "cut", settings._replace(log_every=5))
    for a, b in zip(jax.tree.leaves((whole.params, whole.ema)), jax.tree.leaves((went_on.params, went_on.ema))):
        np.testing.assert_array_equal(a, b)
    assert (whole.ema is None) == (not settings.ema)
    for name, column in numbers(whole.history).items():
        np.testing.assert_array_equal(went_on.history[name], column)
    lines = monitor.read(metrics)
    assert [row["step"] for row in lines if "evaluation" not in row] == list(range(1, 13))
    assert [row["evaluation"] for row in went_on.evaluations] == [{"tau": float(step)} for step in (0, 6, 12)]
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == ["12", "8"]
    again = fit(tmp_path / "cut", settings, stopping)  # a run that has ended is only read
    np.testing.assert_array_equal(again.params["w"], whole.params["w"])
    assert monitor.read(metrics) == lines


def test_a_run_is_only_gone_on_with_as_itself(tmp_path):
    run = RUN._replace(steps=2, eval_every=0)
    fit(tmp_path, run, identity={"target": "abc", "student": "eagle"})
    for words, changes in {
        r"settings.learning_rate was 0.1 and is 0.2": {"settings": run._replace(learning_rate=0.2)},
        r"settings.ema was 0.0 and is 0.5; settings.seed was 0 and is 1": {"settings": run._replace(ema=0.5, seed=1)},
        r"target was 'abc' and is 'abd'": {"identity": {"target": "abd", "student": "eagle"}},
        r"student was 'eagle' and is None": {"identity": {"target": "abc"}},
        r"weights.more was None and is \[1\]": {"params": {**weights(), "more": np.zeros(1, np.float32)}},
        r"frozen was '\w+' and is '\w+'": {"params": {**weights(), "ids": np.arange(1, 4)}},
    }.items():
        with pytest.raises(ValueError, match=f"holds another run: .*{words}"):
            fit(tmp_path, **{"settings": run, "identity": {"target": "abc", "student": "eagle"}, **changes})


def test_a_loss_that_is_not_finite_ends_the_run_at_its_step(tmp_path):
    """Looked at every 3 steps, saved every 4; the numbers before it are kept, no checkpoint after it is."""
    def poisoned(step):
        batch = batches(step)
        batch.tokens[0, 0] = BAD if step == 5 else batch.tokens[0, 0]
        return batch

    with pytest.raises(ValueError, match=r"loss is inf at step 6: .*last good checkpoint is that of step 4, .*/4$"):
        fit(tmp_path, source=poisoned)
    assert [row["step"] for row in monitor.read(tmp_path / "metrics.jsonl")][-1] == 5
    with pytest.raises(ValueError, match=r"loss is inf at step 6: .*no checkpoint was kept"):
        fit(None, source=poisoned)


KILLED = """
import sys, time
from pathlib import Path
from tests import test_train_trainer as here
def slow(step):
    time.sleep(0.05)
    return here.batches(step)
here.fit(Path(sys.argv[1]), here.LONG, slow)
"""
LONG = RUN._replace(steps=60)


@pytest.mark.full
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    root = Path(__file__).resolve().parent.parent
    line = [sys.executable, "-c", KILLED, str(tmp_path / "cut")]
    process = subprocess.Popen(line, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    until = time.monotonic() + 120
    while not (tmp_path / "cut" / "checkpoints" / "12").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    went_on, whole = fit(tmp_path / "cut", LONG), fit(None, LONG)
    np.testing.assert_array_equal(went_on.params["w"], whole.params["w"])
    for name, column in numbers(whole.history).items():
        np.testing.assert_array_equal(went_on.history[name], column)
    assert all(path.name.isdigit() for path in (tmp_path / "cut" / "checkpoints").iterdir())


# --- what is shown, what is refused


def test_event_files_are_written_if_asked_for(tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            told.append((Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, step))

        def close(self):
            told.append("closed")

    module = type(sys)("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    fit(tmp_path, RUN._replace(steps=2), tensorboard=True, evaluate=lambda step, params: [{"tau": 2.0}])
    assert told[0] == ("tensorboard", 1) and told[-1] == "closed"
    assert {("loss", 1), ("loss", 2), ("alpha", 2), ("tau, temperature 0", 2)} <= set(told)


def test_the_bar_shows_the_mean_over_all_tokens_of_a_stretch():
    rows = [{"loss": Mean(np.float64(6), np.float64(2)), "alpha": Mean(np.float64(1), np.float64(2))},
            {"loss": Mean(np.float64(4), np.float64(8)), "alpha": Mean(np.float64(8), np.float64(8))}]  # fmt: skip
    assert monitor._shown(rows, 0.5) == {"loss": "1.000", "alpha": "0.900", "tok/s": "10"}


def test_numbers_that_json_does_not_know_come_back_as_nan(tmp_path):
    journal = monitor.Journal(tmp_path / "m.jsonl", 0)
    with monitor.Monitor(journal, 2, bar=False, tensorboard=None) as shown:
        shown.write(1, [{"loss": Mean(np.float64(1), np.float64(2)), "odd": Mean(np.float64(np.nan), np.float64(1))}])
        shown.evaluation(1, [math.nan, (1, {"a": math.inf})])
    rows = monitor.read(tmp_path / "m.jsonl")
    assert rows[1]["evaluation"] == [None, [1, {"a": None}]]
    assert math.isnan(monitor.columns(rows)["odd"][0]) and monitor.columns(rows)["loss"].tolist() == [0.5]
    (tmp_path / "m.jsonl").write_text('{"step": 1\n' + json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="line 1: not a line of metrics"):
        monitor.read(tmp_path / "m.jsonl")


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
    with pytest.raises(ValueError, match=r"tqdm: pip install 'specjax\[train\]', or progress=False"):
        fit(None, progress=True)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        fit(tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="16 devices, there are 8"):
        meshes.make_mesh(2, 8)
    with pytest.raises(ValueError, match="multiple of accumulate=2 times 8 devices"):
        meshes.share(meshes.make_mesh(8), batches(0).tokens[:8], 2)
