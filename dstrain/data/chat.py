"""Which characters of a rendered chat are the assistant's.

Two ways, the first that applies:
1. the template's own `{% generation %}` markers;
2. the conversation is rendered twice, the second time with a sentinel in place of each assistant message.
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
_UNTOLD = (
    "the chat template changes an assistant's text or adds to it (reasoning, tool calls), so its place "
    "cannot be told; put {% generation %} markers into a template of your own (model.chat_template)"
)
# Private-use characters: no template tests for them and no text should contain them.
_SENTINEL = "\ue0d5{}\ue0d6"


def has_markers(template: str) -> bool:
    """Return whether the template says by itself what the assistant's text is."""
    return _MARKER.search(template) is not None


def render(messages: Sequence[Message], template: str, specials: dict[str, str]) -> tuple[str, list[Span]]:
    """Return the conversation up to its last assistant turn, and the [start, end) of the assistant's text.

    Without markers the spans hold the texts alone, with markers what they enclose. `specials` holds the
    tokenizer's special tokens, such as `eos_token`, which templates read.
    Raises UserError if the template refuses the messages or hides where the assistant's text is.
    """
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if replies:
        messages = messages[: replies[-1] + 1]
    if has_markers(template):
        return _rendered(messages, template, specials, marked=True)
    text, _ = _rendered(messages, template, specials)
    return text, _spans_by_sentinel(messages, template, specials, text)


def _rendered(
    messages: Sequence[Message], template: str, specials: dict[str, str], marked: bool = False
) -> tuple[str, list[Span]]:
    try:
        texts, spans = render_jinja_template(
            [list(messages)], chat_template=template, return_assistant_tokens_mask=marked, **specials
        )
    except Exception as error:  # a template raises what it likes: TemplateError, TypeError, KeyError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses the messages: {reason}") from None
    return texts[0], list(spans[0]) if marked else []


def _spans_by_sentinel(
    messages: Sequence[Message], template: str, specials: dict[str, str], text: str
) -> list[Span]:
    contents, masked = [], []
    if any(message["role"] == "assistant" and message.get("tool_calls") for message in messages):
        raise UserError(_UNTOLD)
    for message in messages:
        if message["role"] == "assistant":
            # Role and text only: whatever else of the message is rendered makes the check below fail.
            masked.append({"role": "assistant", "content": _SENTINEL.format(len(contents))})
            contents.append(message["content"])
        else:
            masked.append(message)
    frame, _ = _rendered(masked, template, specials)
    literals = re.split(_SENTINEL.format(r"\d+"), frame)
    if len(literals) == len(contents) + 1:
        # Templates use a text as it is or stripped, the same way for every turn.
        for change in (str, str.strip, str.rstrip, str.lstrip):
            spans, parts, position = [], [literals[0]], len(literals[0])
            for content, literal in zip(map(change, contents), literals[1:], strict=True):
                spans.append((position, position + len(content)))
                parts += [content, literal]
                position += len(content) + len(literal)
            if "".join(parts) == text:
                return spans
    raise UserError(_UNTOLD)
