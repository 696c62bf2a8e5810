"""scripts/script_tools.py: how every script ends."""

import argparse
from types import SimpleNamespace

import pytest

from specjax import Adaptive, theory
from tests import scripts


@pytest.fixture(scope="module")
def tools():
    with scripts.imported("script_tools") as module:
        yield module


def ending(tools, error=None, status=None, kept=None, **options):
    """The exit status or message of a script whose work ends so; None where it returns."""
    def work(args):
        if error is not None:
            raise error
        return status

    try:
        tools.run_script(work, argparse.Namespace(**options), kept)
    except SystemExit as ended:
        return ended.code
    return None


def test_a_script_ends_with_its_status(tools):
    assert [ending(tools, status=status) for status in (None, 0, 1)] == [None, None, 1]


def test_ctrl_c_is_said_and_where_the_rest_is_if_there_is_some(tools, capsys, tmp_path):
    (tmp_path / "half.json").touch()
    for kept, words in (
        (None, "interrupted"), (tmp_path / "none.json", "interrupted"),
        (tmp_path / "half.json", f"interrupted; what was found is in {tmp_path / 'half.json'}"),
    ):  # fmt: skip
        assert ending(tools, KeyboardInterrupt(), kept=kept) == 130
        assert capsys.readouterr().err.split("\n")[1:] == [words, ""]


def test_what_cannot_be_done_is_one_line_and_a_fault_is_a_traceback(tools):
    assert ending(tools, ValueError("no such thing")) == "ValueError: no such thing"
    assert ending(tools, FileNotFoundError("gone")) == "FileNotFoundError: gone"
    with pytest.raises(ZeroDivisionError):
        ending(tools, ZeroDivisionError())


@pytest.mark.parametrize("said, options", [
    ("top_p=2: must be over 0", "--top-p 2: must be over 0"),
    ("lower max_new_tokens or pass on_capacity='truncate'", "lower --max-new-tokens or pass --on-capacity truncate"),
    ("coupled=True with rule='block': no", "--coupled with --rule block: no"),
    ("drafter=LanguageModel(...): a model", "--drafter LanguageModel(...): a model"),
    ("mesh=1,3: num_heads=4 over model=3; model may be 1", "--mesh 1,3: num_heads=4 over model=3; model may be 1"),
    ("seed=-1: seeds are 0..2**32 - 1", "--seed -1: seeds are 0..2**32 - 1"),
    ("the rule, the drafter and the seed; vocab_size=3", "the rule, the drafter and the seed; vocab_size=3"),
    ("runs/top_p.json and my_top_p and top_p_max", "runs/top_p.json and my_top_p and top_p_max"),
])  # fmt: skip
def test_errors_name_the_options_of_the_script(tools, said, options):
    names = ("top_p", "max_new_tokens", "on_capacity", "coupled", "rule", "drafter", "seed", "mesh", "model")
    assert ending(tools, ValueError(said), **dict.fromkeys(names)) == f"ValueError: {options}"


def test_a_prompt_that_does_not_fit_is_named_with_what_can_be_done(tools):
    ten, eight, any_length = (SimpleNamespace(context_length=length) for length in (10, 8, None))
    tools.check_lengths([[1] * 6, [1] * 4], 4, ten, any_length)
    with pytest.raises(ValueError, match=r"^prompt 2 has 5 tokens: .*tokens 4 .* context of 8; lower --max-new"):
        tools.check_lengths([[1] * 4, [1] * 5], 4, ten, eight)


@pytest.mark.parametrize("name", ["bench", "draft_size", "eval_drafter", "generate", "gpu_check", "training_speed"])
def test_scripts_say_that_they_were_interrupted(name, monkeypatch, capsys):
    def work(args):
        raise KeyboardInterrupt

    with scripts.imported(name, *(["bench_options"] if name == "bench" else [])) as found:
        module, parser = found if name == "bench" else (found, found)
        monkeypatch.setattr(parser, "parse", lambda **_: SimpleNamespace(json=None))
        monkeypatch.setattr(module, "work", work)
        with pytest.raises(SystemExit) as ended:
            module.main()
    assert ended.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"


def test_measuring_costs_is_said_once_where_nobody_watches(tools, monkeypatch, capsys):
    costs = theory.CostModel((0, 2), (1.0, 1.0), (0.0, 0.0))

    def cost_model(lm, drafter, batch, progress):
        assert (lm, drafter, batch) == ("lm", "drafter", 3)
        for done in range(4):
            progress(done, 4)
        return costs

    monkeypatch.setattr(theory, "cost_model", cost_model)
    assert tools.measured("lm", "drafter", 3) == Adaptive(costs=costs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("measuring what rounds cost here, once") and "compiling 4 programs" in line


def test_plain_decoding_in_float32_is_no_rival_of_bfloat16_on_an_accelerator(tools, monkeypatch):
    assert [tools.rival(dtype) for dtype in ("float32", "bfloat16")] == ["bfloat16", "float32"]
    monkeypatch.setattr(tools.jax, "default_backend", lambda: "tpu")
    assert [tools.rival(dtype) for dtype in ("float32", "bfloat16")] == ["bfloat16", None]


def test_mutants_still_name_one_place_each():
    """Else a run of all of them would stop at the first that the code has outgrown."""
    with scripts.imported("mutation_check") as check:
        for mutant in check.MUTANTS:
            source = (check.ROOT / "specjax" / f"{mutant.file}.py").read_text()
            assert source.count(mutant.right) == 1, mutant.what
