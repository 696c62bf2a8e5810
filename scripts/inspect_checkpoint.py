"""What a checkpoint is, what of it would load, and what is missing or left over. Weights are not read.

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
from typing import Any

from specjax.models import families, fetch, huggingface, orbax
from specjax.models.config import LlamaConfig, from_json
from specjax.models.gguf import GGUFFile
from specjax.models.gguf_config import config_of
from specjax.models.load import complaints

PLAIN = LlamaConfig(1, 1, 1, 1, 1, 1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a GGUF file, a directory, or a name that specjax.load knows")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with its shape")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    named = options.checkpoint in fetch.NAMED
    path = fetch.fetch(options.checkpoint) if named else pathlib.Path(options.checkpoint).expanduser()
    try:
        kind, config, shapes, types, text = opened(path)
    except (ValueError, OSError) as error:
        print(f"would not load: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {kind}")
    print(f"family: {families.family_of(config).name}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(PLAIN, field.name):
            print(f"  {field.name} = {runs(value) if isinstance(value, tuple) and len(value) > 2 else value}")
    count = sum(map(math.prod, shapes.values()))
    print(f"tensors: {len(shapes)}, {count:,} parameters; {', '.join(f'{n} {name}' for name, n in types.items())}")
    print(f"tokenizer: {text}")
    if options.tensors:
        for name, shape in shapes.items():
            print(f"  {name} {tuple(shape)}")
    found = complaints(shapes, config)
    if found:
        print("would not load:\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    print("would load")
    return 0


def opened(path: pathlib.Path) -> tuple[str, LlamaConfig, dict[str, tuple[int, ...]], collections.Counter, str]:
    """(kind, configuration, shapes under Hugging Face names, how many tensors of each type, tokenizer)."""
    if (path / orbax.MANIFEST).exists():
        raise ValueError(f"{path} was written by specjax.models.save: {saved(path)}; specjax.load checks it, not this")
    if path.is_dir():
        config, files = huggingface.config_of_directory(path), huggingface.SafetensorsFiles(path)
        types = collections.Counter(files.type_of(name) for name in files.shapes)
        for name in files.shapes:
            huggingface.check_type(files.type_of(name), name, path)
        text = "tokenizer.json" if (path / "tokenizer.json").exists() else "none"
        template = " with a chat template" if huggingface.chat_template_of(path) else ""
        return "Hugging Face layout", config, files.shapes, types, text + template
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; known names: {', '.join(fetch.NAMED)}")
    file = GGUFFile(path)
    entry = file.metadata.get
    text = f"{entry('tokenizer.ggml.model')}, {len(entry('tokenizer.ggml.tokens', ()))} tokens"
    text += " with a chat template" if entry("tokenizer.chat_template") else ""
    types = collections.Counter(info.type for info in file.tensors.values())
    return f"GGUF, architecture {file.architecture}", config_of(file), file.shapes, types, text


def saved(path: pathlib.Path) -> str:
    config = from_json(huggingface.read_json(path / orbax.MANIFEST)["config"])
    return f"{families.family_of(config).name}, {config.num_layers} layers, hidden size {config.hidden_size}"


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
