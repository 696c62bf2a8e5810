"""`load_drafter` and `save_drafter`: drafters on disk, in published layouts or in ours.

    layout                         recognised by                                  file
    EAGLE-3, speculators           config.json: speculators_model_type "eagle3"   eagle_files
    EAGLE-3, older                 config.json: draft_vocab_size                  eagle_files
    multi-token prediction         config.json: speculators_model_type "mtp"      mtp_files
    DFlash, DSpark                 config.json: speculators_model_type            dflash_files
    Medusa                         config.json: medusa_num_heads                  medusa_files
    ours, any of them              specjax_drafter.json                           here: PATH/params/ is an orbax tree
    ours, a whole model            specjax.json                                   models.save; drafts with `model`
    ours, looked-up laws           recycling.json                                 recycling_files

Beside any of them ``specjax_target.json`` says which target it was made for.
"""

import dataclasses
import functools
import inspect
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.drafters import dflash_files, eagle_files, medusa_files, mtp_files, parallel, recycling_files, shipped
from specjax.drafters.dflash import DFlashConfig, dflash
from specjax.drafters.dflash import abstract_params as dflash_params
from specjax.drafters.eagle import EagleConfig, eagle
from specjax.drafters.eagle import abstract_params as eagle_params
from specjax.drafters.medusa import MedusaConfig, medusa
from specjax.drafters.medusa import abstract_params as medusa_params
from specjax.drafters.model import model
from specjax.drafters.mtp import MTPConfig, mtp
from specjax.drafters.mtp import abstract_params as mtp_params
from specjax.drafters.recycling import recycling
from specjax.drafters.recycling_files import RecyclingConfig
from specjax.models import directory, orbax
from specjax.models.config import from_json
from specjax.models.huggingface import read_json
from specjax.models.identity import equal, fingerprint
from specjax.models.language_model import LanguageModel, checked
from specjax.models.llama_params import weight_dtype
from specjax.static import show, whole
from specjax.types import Drafter, PyTree

MANIFEST = "specjax_drafter.json"
MADE_FOR = "specjax_target.json"
INSIDE = "drafter"  # a training run keeps its drafter here
FORMATS = ("speculators", "orbax")


class Kind(NamedTuple):
    """One kind of head. A new one is an entry in `KINDS` and a file that reads and writes its layout."""

    config: type
    abstract: Callable[..., PyTree]  # (config, dtype) -> every weight it may have
    recognises: Callable[[pathlib.Path], bool]
    read: Callable[..., tuple[Any, PyTree]]
    write: Callable[..., None]  # (path, config, params, *, target)
    build: Callable[..., Drafter]  # (config, params, target, **options)
    extra: tuple[str, ...] = ()  # keywords of read besides dtype


KINDS: dict[str, Kind] = {
    "eagle": Kind(
        EagleConfig, eagle_params, eagle_files.recognises, eagle_files.read_eagle, eagle_files.write_eagle, eagle,
        ("feature_layers",),
    ),
    "mtp": Kind(
        MTPConfig, mtp_params, mtp_files.recognises, mtp_files.read_mtp, mtp_files.write_mtp, mtp, ("feature_layers",)
    ),
    "dflash": Kind(
        DFlashConfig, dflash_params, dflash_files.recognises, dflash_files.read_dflash, dflash_files.write_dflash,
        dflash, ("target",),
    ),
    "medusa": Kind(
        MedusaConfig, medusa_params, medusa_files.recognises, medusa_files.read_medusa, medusa_files.write_medusa,
        medusa,
    ),
}  # fmt: skip


def load_drafter(
    path: str | pathlib.Path, target: LanguageModel, *, dtype: Any = "float32",
    feature_layers: tuple[int, ...] | None = None, any_target: bool = False, **options: Any,
) -> Drafter:  # fmt: skip
    """A drafter from a directory with a trained head, looked-up laws, or a draft model that `specjax.models.save`
    wrote; see the module's docstring for what is recognised. For a target on a mesh it lies there in parts too, see
    `specjax.sharding.place_drafter`.

    Args:
      path: the directory; that of a training run, ``scripts/distill_draft.py --out``; or the name of a model that
        specjax has a drafter for, e.g. "smollm2-135m-instruct".
      target: the model it drafts for, as `specjax.load` returns it.
      dtype: of the head's weights, "float32" or "bfloat16".
      feature_layers: for EAGLE-3 and MTP files that do not say which layers of the target they read.
      any_target: also take what was made for another target; the text stays exact, the drafts may be useless.
      options: go to the factory: `num_draft_tokens`, `tree`, `coupled`, `max_length`, ..

    Raises:
      FileNotFoundError: nothing at the path, or a part of it is missing.
      ValueError: a layout that is not recognised; anything in the files that is not understood; a head that does not
        fit the target.
      TypeError: an option that this drafter does not have; names those that it has.
    """
    target, path = checked("target", target), _located(path)
    if not isinstance(any_target, bool):
        raise ValueError(f"any_target={show(any_target)}: must be True or False")
    if not any_target:
        _check_target(path, target)
    drafter, layout = _loaded(path, target, dtype, feature_layers, options), target.model.layout
    return drafter if layout is None else sharding.place_drafter(layout.mesh, drafter, layout.rules)


def _loaded(
    path: pathlib.Path, target: LanguageModel, dtype: Any, feature_layers: tuple[int, ...] | None, options: dict
) -> Drafter:
    if recycling_files.recognises(path) or (path / orbax.MANIFEST).exists():
        if feature_layers is not None:
            raise ValueError(f"feature_layers={show(feature_layers)}: {path} holds no head, it reads none")
        if recycling_files.recognises(path):
            _check_options(path, recycling, options)
            return recycling_files.load(path, target, **options)
        _check_options(path, model, options)
        return model(orbax.load(path, dtype=jnp.dtype(weight_dtype(dtype)).name), target, **options)
    config, params = read(path, target=target, dtype=dtype, feature_layers=feature_layers)
    build = _kind_of(config).build
    _check_options(path, build, options)
    return build(config, _shared(params, target), target, **options)


def _check_options(path: pathlib.Path, factory: Callable[..., Drafter], options: dict) -> None:
    """Refuses what is no option of a factory, in words of its own."""
    known = [name for name in inspect.signature(factory).parameters
             if name not in ("config", "params", "draft", "target", "vocab_size", "tables")]  # fmt: skip
    for name in options:
        if name not in known:
            trees = f"; a tree is drafted by heads ({', '.join(KINDS)})" if name == "tree" else ""
            what = factory.__name__  # pyright: ignore[reportAttributeAccessIssue]
            raise TypeError(f"{what} drafters, as {path} holds, have no option {name!r}: {', '.join(known)}{trees}")


def read(
    path: str | pathlib.Path, *, target: LanguageModel | None = None, dtype: Any = "float32",
    feature_layers: tuple[int, ...] | None = None,
) -> tuple[Any, PyTree]:  # fmt: skip
    """Configuration and weights of a head, as its factory takes them (``eagle(config, params, target)``).

    Args:
      path: the directory.
      target: only some DFlash files need it, to be compared with what they repeat of it.
      dtype, feature_layers: see `load_drafter`.

    Raises:
      FileNotFoundError, ValueError: as `load_drafter`, but for the fit.
    """
    path, dtype = _located(path), weight_dtype(dtype)
    if recycling_files.recognises(path):
        raise ValueError(f"{path} holds looked-up laws and no head: load_drafter makes the drafter")
    if feature_layers is not None:
        if not isinstance(feature_layers, (tuple, list)):
            raise ValueError(f"feature_layers={show(feature_layers)}: give a tuple of layers of the target, or None")
        feature_layers = tuple(whole("feature_layers", layer, 0) for layer in feature_layers)
    if (path / MANIFEST).exists():
        config, params = _restore(path, dtype)
        said = getattr(config, "feature_layers", None)
        if feature_layers not in (None, said):
            raise ValueError(f"feature_layers={feature_layers}: {path} says its own, {said}; leave it out")
        return config, params
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"the directory {path} has neither config.json (published layouts) nor {MANIFEST}")
    for name, kind in KINDS.items():
        if kind.recognises(path):
            given = {"target": target, "feature_layers": feature_layers}
            if feature_layers is not None and "feature_layers" not in kind.extra:
                raise ValueError(f"feature_layers={feature_layers}: {path} is a {name} head, which says its own")
            return kind.read(path, dtype=dtype, **{key: given[key] for key in kind.extra})
    settings = read_json(path / "config.json")
    facts = {key: settings.get(key) for key in ("speculators_model_type", "architectures", "model_type")}
    raise ValueError(
        f"{path / 'config.json'} is of no head that is known ({', '.join(KINDS)}): it has {show(facts)}; a whole model "
        "is loaded with specjax.load and drafts with specjax.drafters.model"
    )


def _located(path: Any) -> pathlib.Path:
    """The directory that a path or the name of a model means.

    Raises:
      ValueError, FileNotFoundError: no path; nothing there.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"path={show(path)}: give the directory of a trained head, or the name of a model")
    found = pathlib.Path(path).expanduser()
    if found.is_dir():
        return found / INSIDE if (found / INSIDE).is_dir() else found
    own = shipped.directory(os.fspath(path))
    if own is not None:
        return own
    named = ", ".join(shipped.names()) or "none"
    raise FileNotFoundError(
        f"{path} is no directory: give the directory of a trained head, with a config.json, or the name of a model "
        f"that a drafter comes with ({named})"
    )


def _check_target(path: pathlib.Path, target: LanguageModel) -> None:
    """Refuses what says that it was made for another target."""
    if not (path / MADE_FOR).exists():
        return
    said, own = read_json(path / MADE_FOR), fingerprint(target)
    if said.get("fingerprint") not in (None, "", own):
        way = "train one for this target (scripts/distill_draft.py)"
        if getattr(target.config, "quantization", ""):  # it is another one than the floats it was made from
            way = f"load the checkpoint that its {target.config.quantization} weights were made from, without quantize="
        raise ValueError(
            f"{path} was made for {said.get('name') or 'another target'} with fingerprint "
            f"{str(said['fingerprint'])[:12]}.., and this target's is {own[:12]}..: {way}, or take "
            "this one with load_drafter(path, target, any_target=True): exact all the same, perhaps slow"
        )


def save_drafter(
    path: str | pathlib.Path, config: Any, params: PyTree, *, format: str = "speculators", target: str = "",
    made_for: LanguageModel | None = None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a drafter so that it is read back bit for bit.

    The directory appears whole or not at all: everything is written next to it and renamed at the end. Of several
    processes all come here, and the first writes.

    Args:
      path: the directory to make.
      config, params: the head, as its factory takes it; or `RecyclingConfig` and `Tables`; or a draft model, as
        `specjax.load` returns it, and its params.
      format: "speculators", the published layout (Medusa has its own), or "orbax". Tables have their own, and models
        that of `specjax.models.save`.
      target: name or path of the target, for the record.
      made_for: the target; `load_drafter` refuses to use the drafter with another one.
      overwrite: replace what is there, if it is a checkpoint, a drafter or empty.

    Raises:
      FileExistsError: there is something at the path that may not be replaced.
      ValueError: an unknown format; no configuration of a head; weights that are not the configuration's; EAGLE-1 in
        a published layout.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"path={show(path)}: give the directory to make")
    if format not in FORMATS:
        raise ValueError(f"format={show(format)}: choose one of {', '.join(map(repr, FORMATS))}")
    if not isinstance(target, (str, os.PathLike)):
        raise ValueError(f"target={show(target)}: give the name or path of the target, for the record")
    target = str(target)
    if isinstance(config, RecyclingConfig):
        write = functools.partial(recycling_files.write, config=config, tables=params)
    elif isinstance(config, LanguageModel):
        write = orbax.writer(config._replace(params=params))
    else:
        write = _writer(config, params, format, target)
    mark = None if made_for is None else fingerprint(checked("made_for", made_for))

    def fill(folder: pathlib.Path) -> None:
        write(folder)
        if mark is not None:
            facts = {"name": target, "fingerprint": mark}
            (folder / MADE_FOR).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    directory.by_first(path, overwrite, fill)


def _writer(config: Any, params: PyTree, format: str, target: str) -> Callable[[pathlib.Path], None]:
    """What writes a head, checked, into a directory."""
    kind = _kind_of(config)
    every = kind.abstract(config)
    what = kind.config.__name__.removesuffix("Config")
    weights = parallel.named(what, params)
    own = {name: leaf for name, leaf in every.items() if name in weights or name not in _borrowed(config)}
    parallel.check_params(what, weights, own)
    if format == "orbax":
        return functools.partial(_save, config=config, params=params, target=target)
    return functools.partial(kind.write, config=config, params=params, target=target)


def _kind_of(config: Any) -> Kind:
    for kind in KINDS.values():
        if isinstance(config, kind.config):
            return kind
    known = ", ".join(kind.config.__name__ for kind in KINDS.values())
    raise ValueError(f"config={show(config)}: give the configuration of a head ({known})")


def _borrowed(config: Any) -> tuple[str, ...]:
    """Weights that are the target's where the head has none."""
    return ("embedding", "head") if isinstance(config, (MTPConfig, EagleConfig)) else ("embedding",)


def _shared(params: PyTree, target: LanguageModel) -> PyTree:
    """Without an embedding that is the target's bit for bit: the target's own is used, and not kept twice."""
    ours, theirs = params.get("embedding"), target.params.get("embedding") if isinstance(target.params, dict) else None
    if ours is None or theirs is None or not equal(theirs.astype(ours.dtype), np.asarray(ours)):
        return params
    return {name: leaf for name, leaf in params.items() if name != "embedding"}


# --- ours


def _save(folder: pathlib.Path, config: Any, params: PyTree, target: str) -> None:
    name = next(name for name, kind in KINDS.items() if isinstance(config, kind.config))
    weights = orbax._named(params)
    orbax._write(folder / "params", weights)
    manifest = {
        "format": orbax._FORMAT, "kind": name, "config": dataclasses.asdict(config), "target": target,
        "weights": [*weights], **orbax._facts(folder / "params"),
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _restore(path: pathlib.Path, dtype: Any) -> tuple[Any, PyTree]:
    manifest = read_json(path / MANIFEST)
    if not orbax.known_format(manifest) or manifest.get("kind") not in KINDS:
        raise ValueError(
            f"{path / MANIFEST} has format {manifest.get('format')!r} and kind {manifest.get('kind')!r}; this version "
            f"of specjax reads formats {orbax._FORMATS} of {', '.join(KINDS)}"
        )
    orbax.check_files(path / MANIFEST, manifest)
    orbax.check_entries(path / MANIFEST, manifest, config=dict, weights=list)
    kind, settings = KINDS[manifest["kind"]], manifest["config"]

    def make():
        layers = {"layers": from_json(settings["layers"])} if "layers" in settings else {}
        return kind.config(**{**settings, **layers})

    config = orbax.understood(path / MANIFEST, make)
    every = kind.abstract(config, dtype)
    absent = {name for name in ("embedding", "head") if name not in manifest["weights"]}  # the target's
    expected = {name: leaf for name, leaf in every.items() if name not in absent}
    with orbax.checked_files(path / "params", manifest):
        layers = getattr(config, "layers", None)
        return config, orbax._restore(path / "params", expected, manifest["format"], layers)
