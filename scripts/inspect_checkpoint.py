"""What a checkpoint is, what of it would load, and what is missing or left over. Weights are not read, but for
a head beside an embedding that it should equal; of our own checkpoints names, shapes and sizes are compared, not bytes.

    python scripts/inspect_checkpoint.py model.gguf
    python scripts/inspect_checkpoint.py path/to/directory
    python scripts/inspect_checkpoint.py smollm2-135m-instruct

Ends with exit status 1 and the reason if `specjax.load` would refuse it.
"""

import argparse
import collections
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from specjax.models import chat, families, fetch, huggingface, llama_params, orbax, tokenizer
from specjax.models.config import LlamaConfig
from specjax.models.gguf import GGUFFile
from specjax.models.gguf_config import config_of
from specjax.models.load import check_tied, complaints

PLAIN = LlamaConfig(1, 1, 1, 1, 1, 1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a GGUF file, a directory, or a name that specjax.load knows")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its shape")
    return parser.parse_args(arguments)


class Found(NamedTuple):
    """What was opened."""

    kind: str
    config: LlamaConfig
    shapes: Mapping[str, tuple[int, ...]]  # of tensors, under Hugging Face names but for our own
    types: Iterable[str]  # of tensors
    tokenizer: str
    refused: Callable[[], list[str]]  # what of the tensors keeps them from loading


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        named = options.checkpoint in fetch.NAMED
        found = opened(fetch.fetch(options.checkpoint) if named else pathlib.Path(options.checkpoint).expanduser())
        describe(options, found)
        refused = found.refused()
    except (ValueError, OSError) as error:
        refused = [str(error)]
    if refused:
        print("would not load: " + "\n  ".join(refused if len(refused) == 1 else ["", *refused]), file=sys.stderr)
        return 1
    print("would load")
    return 0


def describe(options: argparse.Namespace, found: Found) -> None:
    config, shapes = found.config, found.shapes
    print(f"{options.checkpoint}: {found.kind}")
    print(f"family: {families.family_of(config).name}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(PLAIN, field.name):
            print(f"  {field.name} = {runs(value) if isinstance(value, tuple) and len(value) > 2 else value}")
    count, types = sum(map(math.prod, shapes.values())), collections.Counter(found.types)
    print(f"tensors: {len(shapes)}, {count:,} parameters; {', '.join(f'{n} {name}' for name, n in types.items())}")
    print(f"tokenizer: {found.tokenizer}")
    if options.tensors:
        for name, shape in shapes.items():
            print(f"  {name} {tuple(shape)}")


def opened(path: pathlib.Path) -> Found:
    """By the same checks as `specjax.load`, but for those that read all weights.

    Raises:
      FileNotFoundError, ValueError: what `specjax.load` would say.
    """
    if (path / orbax.MANIFEST).exists():
        return saved(path)
    if path.is_dir():
        return directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; known names: {', '.join(fetch.NAMED)}")
    file = GGUFFile(path)
    text, config = tokenizer.from_gguf(file.metadata, str(path)), config_of(file)
    words = spoken(text, file.metadata.get("tokenizer.chat_template"), str(file.metadata["tokenizer.ggml.model"]))
    kind, types = f"GGUF, architecture {file.architecture}", [info.type for info in file.tensors.values()]
    return Found(kind, config, file.shapes, types, words, lambda: tensors_of(file, config, path))


def directory(path: pathlib.Path) -> Found:
    """In the Hugging Face layout."""
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has neither config.json (Hugging Face layout) nor {orbax.MANIFEST} (ours)")
    config, files = huggingface.config_of_directory(path), huggingface.SafetensorsFiles(path)
    for name in files.shapes:
        huggingface.check_type(files.type_of(name), name, path)
    eos_id = config.eos_ids[0] if config.eos_ids else None
    text = tokenizer.from_directory(path, bos_id=config.bos_id, eos_id=eos_id)
    words = spoken(text, huggingface.chat_template_of(path))
    return Found("Hugging Face layout", config, files.shapes, map(files.type_of, files.shapes), words,
                 lambda: tensors_of(files, config, path))  # fmt: skip


def tensors_of(tensors: Any, config: LlamaConfig, path: pathlib.Path) -> list[str]:
    if found := complaints(tensors.shapes, config):
        return found
    check_tied(tensors, config, str(path))
    return []


def saved(path: pathlib.Path) -> Found:
    """Of our own: the sizes of its files are compared, their checksums are not."""
    import orbax.checkpoint as ocp

    (manifest, config), folder = orbax.read_manifest(path), path / "params"
    orbax.check_sizes(folder, manifest)
    text = spoken(orbax.read_tokenizer(path, manifest), manifest["chat_template"])
    needed = orbax._named(llama_params.abstract_params(config))
    orbax._check_shapes(folder, needed, manifest["format"])
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(folder.absolute()).item_metadata
    shapes = {name: tuple(stored[name].shape) for name in needed}
    types = [str(stored[name].dtype) for name in needed]
    return Found("written by specjax.models.save", config, shapes, types, text, list)


def spoken(text: tokenizer.Tokenizer | None, template: str | None, kind: str = "tokenizer.json") -> str:
    """Tokenizer and chat template in words."""
    if text is None:
        return "none: it would load for token ids alone; put the model's tokenizer.json there for text"
    words = f"{kind}, {text.vocab_size} tokens"
    if not template:
        return f"{words}, no chat template: chat=True would be refused"
    try:
        chat.compiled(template)
    except ValueError as error:
        return f"{words}; {error}"
    return f"{words} with a chat template"


def runs(values: tuple[Any, ...]) -> str:
    """One value per layer, equal neighbours together."""
    parts: list[list[Any]] = []
    for value in values:
        short = value.theta if hasattr(value, "theta") else value
        if parts and parts[-1][0] == short:
            parts[-1][1] += 1
        else:
            parts.append([short, 1])
    return ", ".join(f"{count} x {value}" for value, count in parts)


if __name__ == "__main__":
    sys.exit(main())
