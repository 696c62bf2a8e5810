"""scripts/distill_draft.py: what it refuses, its file of options, runs from text to a drafter with a tiny target."""

import importlib
import json
import sys

import jax
import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.models import save
from specjax.train import generate, initial, texts, trainer
from specjax.train import mesh as meshes
from specjax.train.settings import Settings
from tests import scripts
from tests.scripts import ROOT, TINY


@pytest.fixture(scope="module")
def script():
    with scripts.imported("distill_draft") as module:
        yield module


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--out x", "--student is missing"),
        ("--student eagle3", "--out is missing"),
        ("--student hydra --out x", "invalid choice"),
        ("--student eagle3 --out x --tokens none", "is no number of tokens"),
        ("--student eagle3 --out x --steps 0", "--steps must be 1 or more, not 0"),
        ("--student eagle3 --out x --width 3", "--width must be 8 or more, not 3"),
        ("--student eagle3 --out x --depth 0", "--depth must be 1 or more"),
        ("--student eagle3 --out x --learning-rate 0", "--learning-rate"),
        ("--student eagle3 --out x --batch 8 --accumulate 3", "--accumulate 3 does not divide --batch 8"),
        ("--student medusa --out x --draft-vocab 100", "whole vocabulary"),
        ("--student medusa --out x --target-head", "needs --student eagle3"),
        ("--student medusa --out x --on-policy 2", "needs --student draft-lm"),
        ("--student tables --out x --depth 2", "needs a head"),
        ("--student eagle3 --out x --mesh 8", "two numbers"),
        ("--student eagle3 --out x --text nowhere.txt", "--text nowhere.txt: no such file"),
        ("--student eagle3 --out x --text docs", "--text docs: a directory; name a file in it"),
        ("--student eagle3 --out x --prompts docs", "--prompts docs: a directory"),
        ("--student eagle3 --out x --eval-prompts nowhere", "--eval-prompts nowhere: no such file"),
        ("--student eagle3 --out x --corpus README.md", "README.md is a file; name a directory"),
        ("--student eagle3 --out x --corpus README.md/corpus", "README.md is a file; name a directory"),
        ("--student eagle3 --out x --more-corpora docs nowhere", "--more-corpora docs: no text of an earlier run"),
        ("--student eagle3 --out " + 300 * "x", "a name of 300 characters is longer than file systems take"),
        ("--student eagle3 --out README.md", "README.md is a file; name a directory"),
        ("--student eagle3 --out README.md/run", "README.md is a file; name a directory"),
        ("--student eagle3 --out x --config nowhere.json", "--config nowhere.json: no such file"),
    ],
)
def test_the_parser_refuses(script, capsys, monkeypatch, line, words):
    monkeypatch.chdir(ROOT)
    assert words in scripts.refusal(script.parse, line.split(), capsys)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_holds_options_and_the_command_line_wins(script, tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps({"student": "mtp", "tokens": "20k", "out": "x", "target-head": False, "batch": 4,
                                    "mesh": [2, 2]}))  # fmt: skip
    else:
        pytest.importorskip("yaml")
        path.write_text("student: mtp\ntokens: 20k\nout: x\ntarget-head: false\nbatch: 4\nmesh: 2,2\n")
    args = script.parse(["--config", str(path), "--batch", "6"])
    assert (args.student, args.tokens, args.batch, str(args.corpus)) == ("mtp", 20_000, 6, "x/corpus")
    assert args.mesh == "2,2"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"studnet": "mtp"}, "unknown option 'studnet'"),
        ({"student": "hydra"}, "choose one of tables"),
        ({"batch": "many"}, "batch='many'"),
        ({"batch": True}, "must be one value"),
        ({"student": "mtp", "mesh": [2]}, "--mesh 2: give two numbers, 1 or more, as in 8,1"),
        ({"remat": "yes"}, "must be true or false"),
        ([1], "options by name"),
    ],
)
def test_a_file_of_other_options_is_refused(script, tmp_path, capsys, said, words):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(said))
    with pytest.raises(SystemExit):
        script.parse(["--config", str(path), "--out", "x"])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_progress_bar_names_the_extra(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match=r"'\.\[train\]'"):
        script.progress_bar()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Forty texts of a tiny target's vocabulary: it has no tokenizer."""
    path = tmp_path_factory.mktemp("text") / "own.npz"
    size = specjax.load(TINY).model.vocab_size
    texts.save(path, texts.join(np.random.default_rng(0).integers(0, size, (60, 16)).tolist()))
    return path


def run(script, monkeypatch, line):
    monkeypatch.setattr(sys, "argv", ["distill_draft.py", *line.split()])
    script.main()


def small(text, out):
    return (
        f"--target {TINY} --dtype float32 --text {text} --out {out} --rows 8 --slots 24 --tokens 900 --repeats 0 "
        "--max-new-tokens 8 "
    )


def test_tables_go_from_text_to_a_drafter_and_the_same_command_goes_on(script, text, tmp_path, monkeypatch, capsys):
    line = small(text, tmp_path / "run") + "--student tables --num-draft-tokens 3 --megabytes 1"
    run(script, monkeypatch, line + " --dry-run")
    assert "up to 1 MB" in capsys.readouterr().out and not (tmp_path / "run").exists()
    run(script, monkeypatch, line)
    drafter = specjax.load_drafter(tmp_path / "run", specjax.load(TINY))
    assert drafter.num_draft_tokens == 3
    facts = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["temperature"] for row in facts["results"]] == [0.0, 1.0]
    shards = sorted((tmp_path / "run" / "corpus").glob("*.npz"))
    before = [path.stat().st_mtime_ns for path in shards]
    run(script, monkeypatch, line)
    assert before == [path.stat().st_mtime_ns for path in shards]


def test_a_dry_run_of_every_student_writes_nothing(script, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module("distill_plan"), "rate", lambda: 1e9)
    for student in ("eagle1", "eagle3", "medusa", "mtp", "dflash", "draft-lm"):
        reduced = " --draft-vocab 40" if student in ("eagle3", "dflash") else " --layers 1" if "lm" in student else ""
        run(script, monkeypatch, small(text, tmp_path / "run") + f"--student {student} --dry-run{reduced}")
        assert f"{student}: " in capsys.readouterr().out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--student draft-lm --layers 99", "--layers 99: the target has"),
        ("--student eagle3 --draft-vocab 9999", "--draft-vocab 9999: .* tokens; 0 is all"),
        ("--student mtp --mesh 64,2", "--mesh 64,2: needs 128 devices, there are 8; lower DATA or MODEL"),
        ("--student mtp --mesh 8,1 --batch 4", "--batch 4 must be a multiple of --accumulate 1 times 8"),
        ("--student tables --mesh 8,1 --rows 12", "--rows 12 must be a multiple of 8, the devices that --mesh 8,1"),
        ("--student mtp --max-new-tokens 9999999", "--max-new-tokens 9999999: .* at most"),
        ("--student tables --slots 9999999", "--slots 9999999: .* at most"),
    ],
)
def test_what_cannot_work_is_refused_before_text_is_written(script, text, tmp_path, monkeypatch, options, words):
    with pytest.raises(SystemExit, match=words):
        run(script, monkeypatch, small(text, tmp_path / "run") + options)
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_device_is_that_of_what_lies_there(script):
    """Of the target, of the cache of the text, and of what is trained with the optimiser's slots, by their shards."""
    plan, mesh = importlib.import_module("distill_plan"), sharding.make_mesh(2, 2)
    lm = specjax.load(TINY, mesh=mesh)
    line = "--student mtp --out x --rows 8 --slots 24 --batch 4 --width 32"
    args = script.parse(line.split())

    def here(tree):
        first = mesh.devices.flat[0]
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first]
        return sum(shard.data.nbytes for shard in shards)

    assert plan.held(lm.params) == here(lm.params) < 0.6 * sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    cache = lm.model.init_cache(8, 24)
    assert plan.writing(args, lm, mesh) == here((cache.k, cache.v)) + 3 * 4 * 8 // 2 * 320 // 2
    head = initial.params_for(initial.config_for("mtp", lm), lm)
    trained = trainer.start(meshes.placed(mesh, head), Settings(steps=2))
    kept = here(trained.trained) + here(trained.slots)
    shapes = jax.eval_shape(lambda: plan.sketch(args, lm))
    assert plan.learning(args, lm, mesh, shapes) == pytest.approx(4 / 3 * kept + 5 * 4 * 4 * 32 * 320 // 4, rel=1e-3)


def test_weights_in_int8_are_refused_where_a_student_starts_from_them(script, text, tmp_path, monkeypatch):
    save(tmp_path / "int8", specjax.load(TINY, quantize="int8"))
    line = small(text, tmp_path / "run").replace(str(TINY), str(tmp_path / "int8"))
    with pytest.raises(SystemExit, match=r"target has int8 weights.*: load the checkpoint that they were made from"):
        run(script, monkeypatch, line + "--student mtp")
    assert not (tmp_path / "run").exists()


def test_a_directory_keeps_to_one_student(script, text, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "student.json").write_text('{"student": "mtp"}')
    with pytest.raises(SystemExit, match="holds a run of --student mtp"):
        run(script, monkeypatch, small(text, tmp_path / "run") + "--student tables")
    assert not (tmp_path / "run" / "corpus").exists()


@pytest.mark.parametrize(("manifest", "words"), [
    ("{", "manifest.json is damaged"), ('{"format": 1}', "has no complete shard yet"), ("[1]", "it holds .1."),
])  # fmt: skip
def test_text_of_an_earlier_run_that_is_none_is_named_with_its_option(
    script, text, tmp_path, monkeypatch, manifest, words
):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(SystemExit, match=rf"--more-corpora {tmp_path}: .*{words}.*or leave it out"):
        run(script, monkeypatch, small(text, tmp_path / "run") + f"--student tables --more-corpora {tmp_path}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("made", "words"), [
    ("run/drafter/notes.txt", r"no place there: .*holds no checkpoint but \['notes.txt'\]"),
    ("run/student.json", r"student\.json"),
])  # fmt: skip
def test_a_directory_the_drafter_could_not_be_written_to_is_refused_first(
    script, text, tmp_path, monkeypatch, made, words
):
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("")
    with pytest.raises(SystemExit, match=words):
        run(script, monkeypatch, small(text, tmp_path / "run") + "--student tables")
    assert not (tmp_path / "run" / "corpus").exists()


@pytest.mark.full
@pytest.mark.parametrize("student", ["eagle3", "medusa", "mtp", "dflash", "draft-lm"])
def test_every_student_goes_from_text_to_decoding(script, text, tmp_path, monkeypatch, capsys, student):
    """Medusa on a mesh, whose devices hold half of the target while text is written, and with them afterwards."""
    line = small(text, tmp_path / "run") + f"--student {student} --steps 3 --batch 2 --width 16 --num-draft-tokens 2"
    line += " --mesh 2,2" if student == "medusa" else ""
    written, converse = [], generate.converse
    monkeypatch.setattr(generate, "converse", lambda lm, *rest, **how: written.append(lm) or converse(lm, *rest, **how))
    line += {"eagle3": " --draft-vocab 40 --target-head", "dflash": " --draft-vocab 40", "draft-lm": " --layers 1"}.get(
        student, ""
    )
    run(script, monkeypatch, line)
    printed = capsys.readouterr().out
    assert "3 steps of 2 x 16" in printed and "tau, macro" in printed
    metrics = (tmp_path / "run" / "training" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in row for row in metrics) == 3
    qkv, shape = written[0].params["layers"][0]["qkv"], (128 // (2 if student == "medusa" else 1), 64)
    assert {shard.data.shape for shard in qkv.addressable_shards} == {shape}
    drafter = specjax.load_drafter(tmp_path / "run", specjax.load(TINY))
    prompt = [5, 6, 7, 8]
    plain, drafted = (
        specjax.generate(specjax.load(TINY), [prompt], max_new_tokens=12, drafter=d).tokens for d in (None, drafter)
    )
    assert plain == drafted
