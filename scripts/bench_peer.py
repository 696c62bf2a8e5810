"""Hugging Face Transformers in the same turns as specjax: a process of its own, because two libraries share no threads
well, and because torch may live in another Python.

As a program it is that process: a line of JSON in, a line of JSON out.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

PLAIN, LOOKUP, ASSISTED = "plain", "prompt lookup", "assisted"
LOOKUP_TOKENS = 10  # what its documentation uses
MISSING = ("needs torch and transformers: pip install '.[peers]' in the clone, or name a Python that has them by "
           "--peer-python")  # fmt: skip


# --- this side


@contextlib.contextmanager
def started(args: argparse.Namespace, lm) -> Iterator["Peer"]:
    """The peer, with the weights of ``lm`` in every dtype that is benchmarked.

    Raises:
      ValueError: the peer's libraries are missing.
    """
    from specjax.models import save_safetensors

    check = [args.peer_python, "-c", "import torch, transformers"]
    try:
        found = subprocess.run(check, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"--peer-python {args.peer_python}: {error.strerror}") from None
    if found.returncode:
        raise ValueError(f"--peer transformers {MISSING}")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model")
        save_safetensors(path, lm)
        assistant = [str(args.peer_assistant)] if args.peer_assistant else []
        peer = Peer([args.peer_python, str(pathlib.Path(__file__)), str(path), *assistant])
        try:
            yield peer
        finally:
            peer.close()


class Peer:
    """The other process."""

    def __init__(self, command: list[str]):
        lonely = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=lonely | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
        self.version = self.ask({})["version"]

    def ask(self, question: dict) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ValueError(f"the peer ended with status {self.process.wait()}; what it said stands above")
        return json.loads(line)

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(OSError):
            self.process.communicate()


def ways(peer: Peer, args: argparse.Namespace, how) -> list:
    """Its plain decoding, its prompt lookup, and its assisted generation if there is a model for it."""
    import bench_runs

    modes = [PLAIN, LOOKUP, *([ASSISTED] if args.peer_assistant else [])]
    made = []
    for dtype in dict.fromkeys(["float32", *args.dtype]):
        for mode in modes:
            facts = {"library": peer.version} | ({} if mode == PLAIN else {"drafter": mode})

            def run(group, law, warm=False, dtype=dtype, mode=mode):
                answer = peer.ask({
                    "ids": group.ids, "mode": mode, "dtype": dtype, "temperature": law.temperature, "top_p": law.top_p,
                    "max_new_tokens": 2 if warm else how.max_new_tokens, "seed": how.seed + group.prompts[0],
                    "ignore_eos": how.ignore_eos,
                })  # fmt: skip
                wall, first = answer["wall"], answer["first"]
                return bench_runs.Run(answer["tokens"], first, wall - first, wall)

            made.append(bench_runs.Way(f"transformers {mode} {dtype}", bench_runs.PEER, dtype, facts, run))
    return made


# --- that side


def serve(path: str, assistant: str | None) -> None:
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))  # of the extra "peers"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    models: dict[tuple[str, str], Any] = {}

    def model(place: str, dtype: str):
        if (place, dtype) not in models:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype))
            models[place, dtype] = loaded.eval()
        return models[place, dtype]

    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            print(json.dumps({"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}))
        else:
            helper = model(assistant, asked["dtype"]) if assistant and asked["mode"] == ASSISTED else None
            print(json.dumps(generate(torch, model(path, asked["dtype"]), helper, asked)))
        sys.stdout.flush()


def generate(torch, model, helper, asked: dict) -> dict:
    """Seconds until the first pass is done, and of the whole; new tokens, without padding."""
    ids, ends = asked["ids"], model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or [])
    pad, width = model.generation_config.pad_token_id or 0, max(map(len, ids))
    tokens = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    options: dict[str, Any] = {"max_new_tokens": asked["max_new_tokens"], "do_sample": asked["temperature"] > 0,
                               "pad_token_id": pad}  # fmt: skip
    if asked["temperature"] > 0:
        options |= {"temperature": asked["temperature"], "top_p": asked["top_p"], "top_k": 0}
    if asked["mode"] == LOOKUP:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    if helper is not None:
        options["assistant_model"] = helper
    if asked["ignore_eos"]:
        options["min_new_tokens"] = asked["max_new_tokens"]
    first: list[float] = []
    hook = model.register_forward_hook(lambda *_: first.append(time.perf_counter()) if not first else None)
    torch.manual_seed(asked["seed"])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(tokens, attention_mask=mask, **options)
    ended = time.perf_counter()
    hook.remove()
    return {"tokens": [cut(row, ends, asked["ignore_eos"]) for row in out[:, width:].tolist()],
            "first": first[0] - began, "wall": ended - began}  # fmt: skip


def cut(row: list[int], ends: set[int], ignore: bool) -> list[int]:
    """Up to and including the first end token."""
    at = next((i for i, token in enumerate(row) if token in ends), None)
    return row if at is None or ignore else row[: at + 1]


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
