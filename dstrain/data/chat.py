"""Which characters of a rendered chat are the assistant's: its text and the end of its turn.

Two ways, the first that applies:
1. the template's own `{% generation %}` markers;
2. the conversation is rendered twice, the second time with a sentinel in place of each assistant text.
   What stands between the sentinels is the template's own text, so the rest of the first rendering is the
   assistant's. The result is checked character by character, and a template that treats it otherwise is
   an error, never a wrong mask.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dstrain.errors import UserError

Span = tuple[int, int]
Message = dict[str, Any]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Private-use characters: no template tests for them and no text should contain them.
_SENTINEL = "\ue0d5{}\ue0d6"


def render(messages: Sequence[Message], template: str, specials: dict[str, str]) -> tuple[str, list[Span]]:
    """Return the rendered conversation and the [start, end) character spans of the assistant's text.

    `specials` holds the tokenizer's special tokens, such as `eos_token`, which templates read.
    Raises UserError if the template refuses the messages or hides where the assistant's text is.
    """
    if _MARKER.search(template):
        text, spans = _rendered(messages, template, specials, spans=True)
        return text, [(start, end) for start, end in spans]
    text, _ = _rendered(messages, template, specials)
    return text, _spans_by_sentinel(messages, template, specials, text)


def _rendered(
    messages: Sequence[Message], template: str, specials: dict[str, str], spans: bool = False
) -> tuple[str, Any]:
    try:
        texts, indices = render_jinja_template(
            [list(messages)], chat_template=template, return_assistant_tokens_mask=spans, **specials
        )
    except Exception as error:  # a template raises what it likes: TemplateError, TypeError, KeyError
        raise UserError(
            f"the chat template refuses the messages: {str(error).strip().splitlines()[0]}"
        ) from None
    return texts[0], indices[0] if spans else None


def _spans_by_sentinel(
    messages: Sequence[Message], template: str, specials: dict[str, str], text: str
) -> list[Span]:
    contents, masked = [], []
    for message in messages:
        if message["role"] == "assistant":
            masked.append(message | {"content": _SENTINEL.format(len(contents))})
            contents.append(message["content"])
        else:
            masked.append(message)
    frame, _ = _rendered(masked, template, specials)
    literals = re.split(_SENTINEL.format(r"\d+"), frame)
    if len(literals) == len(contents) + 1:
        # Templates use a text as it is or stripped, the same way for every turn.
        for change in (str, str.strip, str.rstrip, str.lstrip):
            shown = [change(content) for content in contents]
            parts = [literals[0]]
            for content, literal in zip(shown, literals[1:], strict=True):
                parts += [content, literal]
            if "".join(parts) == text:
                return _spans(literals, shown)
    raise UserError(
        "the chat template changes the assistant's text, so its place cannot be told; "
        "put {% generation %} markers into a template of your own (model.chat_template)"
    )


def _spans(literals: Sequence[str], contents: Sequence[str]) -> list[Span]:
    spans, position = [], 0
    for literal, content in zip(literals, contents, strict=False):
        start = position + len(literal)
        position = start + len(content)
        spans.append((start, position))
    return spans
