"""What `specjax.load` returns: a model, its weights, and what is needed to talk to it in text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.models import chat
from specjax.models.tokenizer import Tokenizer
from specjax.types import Model, PyTree


class LanguageModel(NamedTuple):
    """A model with its weights, tokenizer and chat template. Only the first two are needed to decode token ids."""

    model: Model
    params: PyTree
    tokenizer: Tokenizer | None = None
    config: Any = None  # LlamaConfig of a loaded model
    chat_template: str | None = None  # jinja2 source
    eos_ids: tuple[int, ...] = ()  # any of these ends a text

    def encode_chat(self, prompt: str | chat.Message | Sequence[chat.Message], **variables: Any) -> list[int]:
        """Token ids of a conversation (a string is one user turn), ending where the assistant's answer begins.

        Raises:
          ValueError: if there is no tokenizer or no chat template.
        """
        if self.tokenizer is None or self.chat_template is None:
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise ValueError(f"this model has no {missing}, which chat=True needs; pass plain prompts or token ids")
        text = chat.render(
            self.chat_template, prompt, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token,
            **variables,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
