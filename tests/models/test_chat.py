"""Chat templates."""

import json

import pytest

from specjax.models import chat
from specjax.models.language_model import LanguageModel
from tests.models.tiny import DATA

OWN_PROMPTS = json.loads((DATA / "smollm2_135m_instruct_own_prompts.json").read_text())


@pytest.mark.parametrize("case", OWN_PROMPTS, ids=lambda case: case["id"])
def test_smollm2_chat_ids_equal_the_reference(smollm2, case):
    assert smollm2.encode_chat(case["prompt"]) == case["prompt_ids"]
    assert smollm2.encode_chat([{"role": "user", "content": case["prompt"]}]) == case["prompt_ids"]


def test_a_conversation_keeps_its_turns_and_its_own_system_prompt(smollm2):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    assert smollm2.tokenizer.decode(smollm2.encode_chat(messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_and_variables_reach_the_template():
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ date }}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    rendered = chat.render(template, "hi", bos_token="<s>", eos_token="</s>", date="today")
    assert rendered == "<s>hi</s>today>"
    assert chat.render(template, "hi", add_generation_prompt=False) == "hi"


def test_blocks_leave_no_whitespace_and_tojson_does_not_escape_html():
    template = "{% for m in messages %}\n  {% if true %}\n{{ m | tojson }}\n  {% endif %}\n{% endfor %}"
    assert chat.render(template, "<é>") == '{"role": "user", "content": "<é>"}\n'


def test_loop_controls_and_dates_work():
    template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    template += "{{ strftime_now('%Y') | length }}"
    assert chat.render(template, [{"role": "user", "content": "a"}] * 3) == "x4"


def test_a_template_that_refuses_is_quoted():
    with pytest.raises(ValueError, match="no system role here"):
        chat.render("{{ raise_exception('no system role here') }}", "hi")


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'a' ", "{% if %}"])
def test_a_template_that_is_not_jinja_is_refused_with_its_line(template):
    with pytest.raises(ValueError, match=r"the checkpoint's chat template .*line 1: .*pass plain text without chat"):
        chat.render(template, "hi")


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os.listdir('.') }}"],
)
def test_a_template_cannot_reach_python(template):
    with pytest.raises(ValueError, match="refused"):
        chat.render(template, "hi")


def test_named_templates_need_a_default():
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert chat.pick(named, "file") == "d"
    assert chat.pick(None, "file") is None
    with pytest.raises(ValueError, match="tool_use"):
        chat.pick(named[:1], "file")


def test_chat_without_template_or_tokenizer_says_which_is_missing(smollm2):
    with pytest.raises(ValueError, match="no chat template"):
        smollm2._replace(chat_template=None).encode_chat("hi")
    with pytest.raises(ValueError, match="no tokenizer"):
        LanguageModel(smollm2.model, smollm2.params).encode_chat("hi")


@pytest.mark.parametrize("template", [True, {"a": 1}, [1], [{"name": "default"}], [{"name": "default", "template": 2}]])
def test_a_template_that_is_none_is_an_error_that_names_the_file(template):
    with pytest.raises(ValueError, match=r"file\.json: chat_template is .*, neither a text nor a list of named ones"):
        chat.pick(template, "file.json")
