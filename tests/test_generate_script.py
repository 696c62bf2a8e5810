"""scripts/generate.py: refusals, prompts, seeds and the arithmetic of --compare. No model is loaded."""

import io
import sys
from pathlib import Path

import pytest

import specjax
from tests import scripts


@pytest.fixture(scope="module")
def script():
    with scripts.imported("generate") as module:
        yield module


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "no prompt"),
        ("- -", "once"),
        ("hi --drafter model", "--draft-model"),
        ("hi --draft-model x", "--drafter model"),
        ("hi --coupled", "--coupled"),
        ("hi --drafter . --tables x", "--tables"),
        ("hi --drafter . --draft-checkpoint x", "--draft-checkpoint"),
        ("hi --drafter none --num-draft-tokens 3", "--num-draft-tokens"),
        ("hi --drafter none --compare", "--compare"),
        ("hi --drafter none --adaptive", "--adaptive"),
        ("hi --drafter retokenize --draft-model x --adaptive", "--adaptive"),
        ("hi --drafter eagle", "--draft-checkpoint"),
        ("hi --draft-checkpoint x", "--drafter"),
        ("hi --drafter cascade --draft-checkpoint random", "trained"),
        ("hi --tables x", "--tables"),
        ("hi --drafter cascade --tables x --draft-checkpoint y", "one of them"),
        ("hi --tree 2,1", "--tree"), ("hi --drafter=", "--drafter is empty"),
        ("hi --drafter medusa --draft-checkpoint random --tree 2 --coupled", "--tree"),
        ("hi --drafter medusa --draft-checkpoint random --tree 2 --num-draft-tokens 2", "number of nodes"),
        ("hi --drafter lookahead --num-draft-tokens 2", "lookahead"),
        ("hi --drafter recycling --coupled", "--coupled"),
        ("hi --compare --max-new-tokens 0", "--max-new-tokens"),
        ("hi -n 0", "-n must"),
        ("hi -n 2 --compare", "-n"),
        ("hi --logprobs", "--json"),
        ("hi --logprobs --json --compare", "--compare"),
        ("hi --repeats 3", "--compare"),
        ("hi --compare --repeats 0", "--repeats"),
        ("hi --mesh 8", "two numbers"),
    ],
)
def test_the_parser_refuses(script, capsys, line, words):
    assert words in scripts.refusal(script.parse, line.split(), capsys)


def test_a_checkpoint_without_tokenizer_is_refused_before_it_is_loaded(script, monkeypatch):
    monkeypatch.setattr(specjax, "load", lambda *args, **options: pytest.fail("it was loaded"))
    monkeypatch.setattr(sys, "argv", ["generate.py", "hi", "--model", str(scripts.TINY)])
    with pytest.raises(SystemExit, match=r"--model \S+ has no tokenizer.json, and prompts are text: put the model's"):
        script.main()


@pytest.mark.parametrize("given, words", [
    ({"NUM_PROCESSES": "2"}, "has JAX_NUM_PROCESSES of JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
    ({"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "two", "PROCESS_ID": "0"}, "has JAX_NUM_PROCESSES=two: set"),
    ({"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "-1"}, "has JAX_PROCESS_ID=-1: set"),
])  # fmt: skip
def test_an_environment_that_is_half_of_a_job_is_named_as_such(script, capsys, monkeypatch, given, words):
    for name, value in given.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    said = scripts.refusal(script.parse, ["hi"], capsys)
    assert words in said and said.endswith("to run alone")


@pytest.mark.parametrize(
    "line, name",
    [
        ("--top-p 2", "top_p"),
        ("--temperature -1", "temperature"),
        ("--min-new-tokens -1", "min_new_tokens"),
        ("--max-new-tokens -1", "max_new_tokens"),
        ("--seed -1", "seed"),
        ("--num-draft-tokens 0", "num_draft_tokens"),
        ("--num-draft-tokens -2", "num_draft_tokens"),
    ],
)
def test_numbers_out_of_range_are_refused_before_loading(script, line, name):
    with pytest.raises(ValueError, match=name):
        script.check_ranges(script.parse(["hi", *line.split()]))


def test_draft_tokens_default_and_given(script, monkeypatch):
    from specjax.drafters import shipped

    monkeypatch.setattr(shipped, "names", list)
    build = script.draft_sources.build
    assert build(script.parse(["hi"]), None).num_draft_tokens == 7
    assert build(script.parse(["hi", "--num-draft-tokens", "3"]), None).num_draft_tokens == 3
    with pytest.raises(ValueError, match="num_draft_tokens"):
        build(script.parse(["hi", "--num-draft-tokens", "0"]), None)


def test_a_drafter_is_a_source_a_directory_or_one_that_is_shipped(script, tmp_path, monkeypatch):
    """By default the one shipped for the model, else ngram."""
    from specjax.drafters import shipped

    choose, own = script.draft_sources.choose, tmp_path / "data" / "some-model"
    own.mkdir(parents=True)
    monkeypatch.setattr(shipped, "names", lambda: ["some-model"])
    monkeypatch.setattr(shipped, "directory", lambda name: own if name == "some-model" else None)
    assert choose("auto", "some-model") == ("stored", "shipped some-model", str(own))
    assert choose("some-model", "other") == choose("auto", "some-model")
    assert choose("auto", "other") == choose("ngram", "some-model") == ("ngram", "ngram", "")
    assert choose(str(tmp_path), "some-model") == ("stored", str(tmp_path), str(tmp_path))
    (tmp_path / "head.npz").touch()
    for name, words in (("nowhere", "no draft source and no directory"), (tmp_path / "head.npz", "is a file")):
        with pytest.raises(ValueError, match=rf"--drafter .*{words}.*distill_draft.*some-model\)$"):
            choose(str(name))


def test_directories_become_drafters(script, tmp_path):
    import numpy as np

    from specjax.drafters import RecyclingConfig, build_tables

    lm, rng = specjax.load(TINY), np.random.default_rng(0)
    size = lm.model.vocab_size
    laws = rng.integers(0, size, 20), rng.integers(0, size, (20, 4)), np.full((20, 4), 0.2)
    specjax.save_drafter(tmp_path / "run" / "drafter", RecyclingConfig(5), build_tables([laws], size))
    build = script.draft_sources.build
    assert build(script.parse(["hi", "--drafter", str(tmp_path / "run")]), lm).num_draft_tokens == 5
    parsed = script.parse(["hi", "--drafter", str(tmp_path / "run" / "drafter"), "--num-draft-tokens", "3"])
    assert build(parsed, lm).num_draft_tokens == 3
    with pytest.raises(ValueError, match=r"^--drafter is empty: give one of ngram"):
        script.draft_sources.choose("")
    with pytest.raises(TypeError, match=r"^recycling drafters, as .* have no option 'foo': num_draft_tokens"):
        specjax.load_drafter(tmp_path / "run", lm, foo=1)
    with pytest.raises(ValueError, match="any_target='x': must be True or False"):
        specjax.load_drafter(tmp_path / "run", lm, any_target="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="scan_layers='no': must be True or False"):
        specjax.load(TINY, scan_layers="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^--tree: not for what .*run holds .*drafted by heads \(eagle, mtp"):
        build(script.parse(["hi", "--drafter", str(tmp_path / "run"), "--tree", "2,1"]), lm)
    with pytest.raises(FileNotFoundError, match=r"has neither config\.json"):
        build(script.parse(["hi", "--drafter", str(tmp_path)]), lm)


@pytest.mark.parametrize("line, fast, loaded, chosen", [
    ("--demo --compare", "float32", ["bfloat16", "float32"], "float32"),
    ("--demo", "bfloat16", ["bfloat16", "float32"], "bfloat16"),
    ("--demo --dtype bfloat16", "float32", ["bfloat16"], "bfloat16"),
    ("hi --compare", "bfloat16", ["float32", "bfloat16"], "float32"),
])  # fmt: skip
def test_an_open_type_is_the_one_that_reads_windows_faster_and_rivals_are_kept_to_compare(
    script, monkeypatch, line, fast, loaded, chosen
):
    import bench_parts

    asked, other = [], {"float32": "bfloat16", "bfloat16": "float32"}[fast]
    monkeypatch.setattr(specjax, "load", lambda name, *, dtype, mesh: asked.append(dtype) or dtype)
    monkeypatch.setattr(bench_parts, "quickest", lambda models: {fast: 1.0, other: 2.0})
    monkeypatch.setattr(script, "rival", lambda dtype: {"float32": "bfloat16", "bfloat16": "float32"}[dtype])
    args = script.parse(line.split())
    models = script.load(args, None)
    assert asked == loaded and args.dtype == chosen and models[chosen] == chosen
    assert len(models) == (2 if args.compare else 1)


def test_the_type_of_the_demo_is_open_unless_told(script):
    assert [script.parse(line.split()).dtype for line in ("hi", "--demo", "--demo --dtype float32")] == [
        "float32", None, "float32"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["0", "2,x", "dynamic:3,2", "dynamic:", "2,,1", ""])
def test_trees_that_are_none_are_refused_before_loading(script, text):
    with pytest.raises(ValueError, match="--tree"):
        script.check_ranges(script.parse(f"hi --drafter medusa --draft-checkpoint random --tree {text}".split(" ")))


TINY = Path(__file__).parent / "data" / "tiny_models" / "llama_tied_sharded"
LINES = [
    "ngram", "suffix", "recycling", "lookahead", "cascade", f"model --draft-model {TINY}",
    "eagle --draft-checkpoint random", "mtp --draft-checkpoint random --tree 2,1",
    "medusa --draft-checkpoint random --tree dynamic:4,2,3", "dflash --draft-checkpoint random",
]  # fmt: skip


@pytest.mark.parametrize("line", [LINES[2], *(pytest.param(line, marks=pytest.mark.full) for line in LINES)])
def test_every_draft_source_runs_by_name_and_says_what_plain_decoding_says(script, line):
    """On a tiny model whose logits are far apart; untrained heads draft nonsense."""
    lm = specjax.load(TINY)
    drafter = script.draft_sources.build(script.parse(["hi", "--drafter", *line.split()]), lm)
    prompts = [[5, 9, 7, 5, 9], [11, 3]]
    plain = specjax.generate(lm, prompts, max_new_tokens=12, eos_ids=[])
    out = specjax.generate(lm, prompts, max_new_tokens=12, eos_ids=[], drafter=drafter)
    assert out.tokens == plain.tokens


def test_prompts_come_from_arguments_then_file_then_demo(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n\n"))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\\n"}\n\n{"prompt": "two\u2028", "other": 1}\n', encoding="utf-8")
    prompts = script.read_prompts(script.parse(["a\n", "-", "--file", str(file), "--demo"]))
    assert prompts[:4] == ["a\n", "from stdin\n", "one\n", "two\u2028"]
    assert len(prompts) == 8


def test_a_text_file_is_one_prompt_without_its_last_newline(script, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    assert script.read_prompts(script.parse(["--file", str(file)])) == ["two\nlines"]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.txt", None, "cannot read"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("bad.jsonl", b'{"prompt": "x"}\n{"prompt"', "line 2: not JSON"),
        ("bad.jsonl", b'\n{"text": "x"}', "line 2: needs"),
        ("bad.jsonl", b'{"prompt": 3}', "line 1: needs"),
        ("bad.jsonl", b'["prompt"]', "line 1: needs"),
        ("empty.jsonl", b"\n", "no prompt"),
        (".", None, "cannot read"),
    ],
)
def test_file_errors_are_one_line(script, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        script.read_prompts(script.parse(["--file", str(tmp_path / name)]))
    assert words in error.value.code
    assert "\n" not in error.value.code


def test_seeds_are_those_of_generate(script):
    args = script.parse(["a", "b", "--seed", "5", "-n", "3"])
    seeds = [script.options(args, prompt, sample)["seed"] for prompt in range(2) for sample in range(3)]
    assert seeds == [5 + row for row in range(6)]
    assert script.options(args)["seed"] == 5


def test_totals_use_each_configurations_own_tokens(script):
    def row(plain, spec, equal):
        return {
            "tokens": {"plain float32": plain, "plain bfloat16": plain, "speculative": spec},
            "seconds": {"plain float32": [1.0, 9.0, 2.0], "plain bfloat16": [4.0], "speculative": [1.0]},
            "equal": equal,
        }

    both = script.total([row(10, 20, True), row(30, 10, False)])
    rates = {"plain float32": 40 / 4, "plain bfloat16": 40 / 8, "speculative": 30 / 2}
    assert both == {"tokens_per_second": rates, "baseline": "plain float32", "ratio": 1.5, "equal": False}


@pytest.mark.parametrize(
    "row, rule, words",
    [
        ({"equal": True}, "match", "same text"),
        ({"equal": False}, "match", "DIFFERENT TEXT"),
        ({"equal": False}, "rejection", "different draws"),
        ({"equal": False}, "block", "different draws"),
        ({"equal": False, "divergence": {"index": 3, "margin": 1e-5}}, "match", "part at token 3"),
    ],
)
def test_equality_in_words_follows_the_rule_in_effect(script, row, rule, words):
    assert words in script.describe_equality(row, rule)
