"""Checkpoints of a run: written by orbax beside the training, whole or not at all, and only read by the same run.

    DIRECTORY/run.json       what the run is: settings, shapes, and what the caller says of target, student and data
    DIRECTORY/checkpoints/   the last few, by step
    DIRECTORY/metrics.jsonl  see `specjax.train.monitor`
"""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processes
from specjax.static import show
from specjax.types import PyTree

FORMAT = 3  # 1 and 2: weights in another order, see `specjax.models.llama_params`


def digest(tree: PyTree) -> str:
    """A fingerprint of arrays: their places in the tree, types, shapes and bytes."""
    made = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(jax.device_get(leaf))
        made.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        made.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
    return made.hexdigest()[:16]


class Run:
    """A directory with the checkpoints of one run.

    Args:
      directory: made if need be.
      identity: JSON-able facts by name. The first run writes them down, later ones must say the same.
      keep: checkpoints that stay.

    Raises:
      ValueError: the directory is of a run that differs; names what differs.
    """

    def __init__(self, directory: str | os.PathLike, identity: dict[str, Any], keep: int):
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(f"directory={show(directory)}: give the directory of the run, or None")
        import orbax.checkpoint as ocp

        self.path = pathlib.Path(directory).expanduser().absolute()
        if processes.first():
            self._claim({"format": FORMAT, **identity})
        processes.wait("run.json")
        if not processes.first():
            self._claim({"format": FORMAT, **identity})
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    def _claim(self, identity: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "run.json"
        identity = json.loads(json.dumps(identity))
        if not file.exists():
            if any((self.path / "checkpoints").glob("*")):
                raise ValueError(
                    f"{self.path} has checkpoints but no run.json that says of which run: give another directory, or "
                    "delete checkpoints/ to begin anew"
                )
            part = file.with_name("run.json.part")
            part.write_text(json.dumps(identity, indent=1), encoding="utf-8")
            os.replace(part, file)
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is damaged ({error}): give another directory") from error
        differing = _differences("", before, identity)
        if differing:
            raise ValueError(
                f"{self.path} holds another run: {'; '.join(differing[:4])}. Give what it was, or another directory"
            )

    def restore(self, training: PyTree) -> PyTree:
        """The state of the last checkpoint, placed like ``training``; ``training`` itself if there is none.

        Raises:
          ValueError: a checkpoint that cannot be read.
        """
        import orbax.checkpoint as ocp

        step = self._manager.latest_step()
        if step is None:
            return training
        saved = _kept(training)
        leaves, tree = jax.tree.flatten(saved)
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in zip(_names(saved), leaves, strict=True)
        }
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # orbax raises many kinds for a damaged directory
            where = self.path / "checkpoints" / str(step)
            raise ValueError(f"{where} is damaged: {error}. Delete it to go on from the one before") from error
        return training._replace(**jax.tree.unflatten(tree, [found[name] for name in wanted]))

    def save(self, step: int, training: PyTree) -> None:
        """Begins to write a checkpoint; training goes on meanwhile."""
        import orbax.checkpoint as ocp

        # A copy: the next step is given the buffers to write in, and on a CPU orbax reads them where they lie.
        saved = jax.tree.map(jnp.copy, _kept(training))
        state = dict(zip(_names(saved), jax.tree.leaves(saved), strict=True))
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def last(self) -> str:
        """The last checkpoint, in words."""
        self._manager.wait_until_finished()
        step = self._manager.latest_step()
        if step is None:
            return f"{self.path} has no checkpoint yet"
        return f"the last good checkpoint is that of step {step}, {self.path / 'checkpoints' / str(step)}"

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def _kept(training: Any) -> dict[str, PyTree]:
    """What changes; what is frozen comes from the caller again, and is compared by its digest."""
    return {name: leaf for name, leaf in training._asdict().items() if name != "frozen"}


def _names(tree: PyTree) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            text
            for key in sorted(before.keys() | now.keys())
            for text in _differences(f"{name}.{key}" if name else key, before.get(key), now.get(key))
        ]
    return [] if before == now else [f"{name} was {show(before)} and is {show(now)}"]
