"""Programs of decoding and training for TPUs that are not there: shapes go in, what the TPU's compiler made comes out.

Imported before jax: it finds the compiler (libtpu) and keeps jax on the CPU otherwise. libtpu is looked for where
TPU_LIBRARY_PATH says, then in .cache/libtpu of this clone, then among the installed packages. Only programs that import
this module see the one in .cache: an installed libtpu makes every jax program of the environment look for a TPU.
"""

import dataclasses
import functools
import os
import pathlib
from typing import Any, NamedTuple

LIBTPU = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "libtpu" / "libtpu" / "libtpu.so"
QUIET = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", **({"TPU_LIBRARY_PATH": str(LIBTPU)} if LIBTPU.exists() else {}),
}  # fmt: skip
for name, value in QUIET.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from hlo_text import collectives  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from model_shapes import CONFIGS  # noqa: E402

import specjax  # noqa: E402
from specjax import LanguageModel, drafters, loop, queued, sharding, slots  # noqa: E402
from specjax.drafters.dflash import DFlashConfig, dflash  # noqa: E402
from specjax.drafters.dflash import abstract_params as dflash_params  # noqa: E402
from specjax.drafters.eagle import EagleConfig, eagle  # noqa: E402
from specjax.drafters.eagle import abstract_params as eagle_params  # noqa: E402
from specjax.models import llama  # noqa: E402
from specjax.models.config import LlamaConfig  # noqa: E402
from specjax.models.llama_params import abstract_params  # noqa: E402
from specjax.round import no_limits  # noqa: E402
from specjax.types import Text  # noqa: E402

HEADS = ("eagle3", "dflash")
DRAFT_VOCABULARY = 32000  # of an EAGLE-3 head, as published ones have
SLOTS = 512  # one block of attention: more are a loop, whose body the compiler would count once


class Cost(NamedTuple):
    """Of one device in one run of a program."""

    flops: float
    bytes: float  # that must be read
    collectives: dict[str, float]  # bytes by kind
    memory: float  # peak
    aliased: float  # bytes of results that lie where an argument lay


def mesh_of(topology: str, data: int) -> Mesh:
    """A mesh ("data", "model") of the chips of a topology such as v5e:2x4."""
    one = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **one)
    except Exception as error:  # of many kinds: no libtpu, an unknown topology
        if str(error).startswith("INVALID_ARGUMENT"):
            raise SystemExit(f"{topology}: {error}; give a slice that there is, such as v5e:2x4 or v5e:8x8") from error
        raise SystemExit(f"{topology}: {error}\nThe compiler is libtpu: `make libtpu` puts it into .cache") from error
    count = len(described.devices)
    if count % data:
        raise SystemExit(f"--data {data} does not divide the {count} chips of {topology}")
    return topologies.make_mesh(described, (data, count // data), sharding.AXES)


def placed(mesh: Mesh, tree: Any) -> Any:
    """Shapes on the mesh, by `specjax.sharding.WEIGHTS`."""
    def put(path, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.weight_sharding(mesh, path, x.shape))

    return jax.tree_util.tree_map_with_path(put, tree)


def language_model(mesh: Mesh, config: LlamaConfig, scan_layers: bool = False) -> LanguageModel:
    """A target or draft model from shapes, in bfloat16, on the mesh. Scanned layers are counted once."""
    params = placed(mesh, abstract_params(config, dtype="bfloat16", scan_layers=scan_layers))
    model = sharding.on_mesh(mesh, llama.model(config, dtype="bfloat16", scan_layers=scan_layers))
    return LanguageModel(model, params, config=config)


def head_config(kind: str, config: LlamaConfig) -> Any:
    """A head of the usual size for a target: one layer (EAGLE-3), five (DFlash), of the target's own width."""
    sizes = dataclasses.replace(
        config, num_layers=1 if kind == "eagle3" else 5, windows=(), ropes=(), norms="before", norm_offset=0.0,
        activation="silu", embedding_scale=1.0, tie_embeddings=False, quantization="", qk_norm=kind == "dflash",
        attention_softcap=0.0, logit_softcap=0.0,
    )  # fmt: skip
    if kind == "eagle3":
        return EagleConfig(sizes, (0, 1, 2), draft_vocab_size=min(DRAFT_VOCABULARY, config.vocab_size))
    return DFlashConfig(sizes, (0, 1, 2), mask_token_id=0, block_size=16)


def head_params(mesh: Mesh, kind: str, made: Any) -> Any:
    """A head's weights, where `specjax.sharding.place_drafter` puts them."""
    shapes = (dflash_params if kind == "dflash" else eagle_params)(made, jnp.bfloat16)
    return placed(mesh, {name: leaf for name, leaf in shapes.items() if name != "embedding"})


def drafter_of(mesh: Mesh, kind: str, lm: LanguageModel, k: int, tree: Any = None) -> Any:
    """A drafter from shapes: "lookup", a draft model of `CONFIGS`, or a head. A tree needs a head."""
    if not k:
        return specjax.plain()
    if kind == "lookup":
        return drafters.ngram(k)
    if kind in CONFIGS:
        return drafters.model(language_model(mesh, CONFIGS[kind], scan_layers=True), lm, k)
    made = head_config(kind, lm.config)
    params = head_params(mesh, kind, made)
    number: dict[str, Any] = {"num_draft_tokens": k} if tree is None else {"tree": tree}
    if kind == "dflash":
        drafter = dflash(made, params, lm, **number)
    else:  # the ids must be numbers to be checked; only their shape is compiled
        ids = np.arange(made.num_columns) if made.draft_vocab_size else None
        drafter = eagle(made, params if ids is None else {**params, "ids": ids}, lm, **number)
    def shape(x):
        everywhere = NamedSharding(mesh, sharding.spec(mesh, (), x.shape))
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    params = jax.tree.map(shape, drafter.params)
    return sharding.place_drafter(mesh, drafter._replace(params=()))._replace(params=params)


class Shapes(sharding.Layout):
    """Says where shapes lie, as a layout says it of arrays."""

    def bound(self, axes: tuple[str, ...], x: Any) -> Any:
        own = NamedSharding(self.mesh, sharding.spec(self.mesh, axes, x.shape, self.rules))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)


class Programs:
    """The programs of one target and drafter on one mesh, compiled when asked for."""

    def __init__(
        self, mesh: Mesh, config: LlamaConfig, *, k: int, batch: int, kind: str = "lookup", rule: Any = None,
        tree: Any = None, width: int = SLOTS, one_window: bool = False,
    ):  # fmt: skip
        """``one_window``: no narrower windows for short drafts, of which the compiler would count every one."""
        self.mesh, self.batch, self.width, self.chunk = mesh, batch, width, min(512, width)
        self.lm = language_model(mesh, config)
        self.drafter = drafter_of(mesh, kind, self.lm, k, tree)  # held: programs know its functions weakly
        if one_window:
            self.drafter = self.drafter._replace(widths=())
        rule = self.drafter.default_rule if rule is None or not k else rule
        self.program, self.weights = loop.split(self.lm.model, self.lm.params, self.drafter, rule, False)

        def arguments():
            lengths = jnp.ones(batch, jnp.int32)
            text = Text(jnp.zeros((batch, width), jnp.int32), lengths, lengths)
            keys, laws = specjax.row_keys(range(batch)), specjax.make_sampling(batch, config.vocab_size)
            return text, keys, laws, no_limits(64, batch)

        self.text, self.keys, self.sampling, self.limits = self.rows(jax.eval_shape(arguments))

    def rows(self, tree: Any) -> Any:
        """Shapes with their rows shared out."""
        return sharding.by_rows(Shapes(self.mesh, sharding.RULES), tree, self.batch)

    def state(self, shapes: Any) -> Any:
        """A decoding state where rounds leave it."""
        return sharding.settled(Shapes(self.mesh, sharding.RULES), shapes)

    def started(self) -> Any:
        start = functools.partial(loop.start, self.program.prefill(), chunk=self.chunk)
        return self.state(jax.eval_shape(start, self.weights, self.text, self.keys, self.limits))

    def prefill(self) -> Any:
        """`loop.start`; one chunk of the loop over a prompt is what is counted."""
        program = self.program.prefill()
        return loop.start.lower(program, self.weights, self.text, self.keys, self.limits, chunk=self.chunk).compile()

    def round(self) -> Any:
        """`loop.step`: draft, verify, accept, commit. A drafter's loop over its steps is counted once."""
        return loop.step.lower(self.program, self.weights, self.started(), self.sampling, self.limits).compile()

    def decode(self) -> Any:
        """`loop.decode`: rounds until every row has finished, counted as one round."""
        return loop.decode.lower(self.program, self.weights, self.started(), self.sampling, self.limits).compile()

    def draft(self, n: int) -> Any:
        """The drafter alone, n tokens or all of a block."""
        start, drafter, everything = self.started(), self.drafter, self.weights.drafter

        def run(params, keys, state, text, sampling):
            return drafter.draft(params, keys, state, text, sampling, n)

        return jax.jit(run, donate_argnums=2).lower(
            everything, self.keys, start.drafter, self.text, self.sampling).compile()  # fmt: skip

    def engine(self) -> Any:
        """`specjax.slots.step`, with as many slots as there are rows."""
        sizes = queued.Sizes(self.width, self.width // 2, 8, 4, 8, 32)
        given = jax.device_get((specjax.make_sampling(self.batch, self.lm.model.vocab_size), no_limits(0, self.batch)))
        asked = (queued.own_sampling(given[0], sizes, self.lm.model.vocab_size), queued.own_limits(given[1], sizes))
        keys = jax.eval_shape(jax.random.key_data, self.keys)
        empty = functools.partial(slots.empty, self.program.prefill())
        shapes = jax.eval_shape(empty, self.weights, self.text, keys, *jax.tree.map(jnp.asarray, asked))
        every = self.rows(shapes._replace(state=()))._replace(state=self.state(shapes.state))
        dropped = self.rows(jax.ShapeDtypeStruct((self.batch,), bool))
        ends = jax.ShapeDtypeStruct((8,), jnp.int32)
        return slots.step.lower(self.program, self.weights, every, dropped, ends).compile()

    def write_text(self) -> Any:
        """`specjax.train.generate.run`, which writes the text of distillation: a token into every row."""
        from specjax.train import generate

        shape: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        opening, ids = shape((8,)), shape((16,))
        begin = functools.partial(generate.begin, self.lm.model, self.batch, self.width)
        state = self.rows(jax.eval_shape(begin, self.weights.target, opening))
        template = generate.Template(ids, opening, shape(()))
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, steps = self.weights.target, generate.STEPS
        return generate.run.lower(self.lm.model, steps, params, key, template, state).compile()

    def unread(self) -> int:
        """Bytes of an embedding that is looked up and not multiplied: a device holds them and does not read them."""
        if self.lm.config.tie_embeddings:
            return 0
        leaf = self.lm.params["embedding"]
        return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def train_step(mesh: Mesh, config: LlamaConfig, kind: str, *, rows: int, width: int) -> Any:
    """A step of `specjax.train` that teaches a head, or a draft model, the target's laws on ``rows`` texts."""
    from specjax.train import students, trainer
    from specjax.train.settings import Settings
    from specjax.train.types import Batch

    lm = language_model(mesh, config)
    if kind in CONFIGS:
        student = language_model(mesh, CONFIGS[kind])
        params: Any = student.params
    else:
        student = head_config(kind, config)
        params = {name: leaf for name, leaf in head_params(mesh, kind, student).items() if name != "ids"}
        if kind == "eagle3" and student.draft_vocab_size:
            params["ids"] = jax.ShapeDtypeStruct((student.num_columns,), jnp.int32)
    settings = Settings(steps=100, dtype="bfloat16")
    training = jax.eval_shape(functools.partial(trainer.start, settings=settings), params)
    shapes: list[Any] = [jax.ShapeDtypeStruct((rows, width), dtype) for dtype in (jnp.int32, bool, jnp.int32)]
    batch = Batch(*shapes)
    split = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec(mesh, ("batch", "window"), x.shape))), batch)
    loss = students.loss_of(student, lm)
    lowered = trainer.update.lower(loss, settings, mesh, placed(mesh, training), lm.params, split)
    return lowered.compile()


def cost_of(compiled: Any, unread: int = 0) -> Cost:
    """What one compiled program costs by the compiler's count; ``unread`` bytes of its arguments are only held."""
    count, memory = compiled.cost_analysis(), compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )  # fmt: skip
    read = memory.argument_size_in_bytes - unread
    return Cost(count.get("flops", 0.0), read, collectives(compiled.as_text()), peak, memory.alias_size_in_bytes)
