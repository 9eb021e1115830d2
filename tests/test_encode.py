"""Rows to tokens: end and BOS tokens, what is in the loss, and chat templates of several families."""

import itertools
import json
import re
import time

import numpy as np
import pytest
from conftest import QUICKSTART
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dstrain.data.encode import Encoder, Encoding, pieces_of
from dstrain.errors import UserError

EOS = "<|endoftext|>"


def build(template=None, specials=(), bos=None, adds_bos=False, eos=None):
    """Return a tokenizer of the quickstart's vocabulary with special tokens and a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
    if eos:
        tokenizer.add_special_tokens({"eos_token": eos})
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer, format, rows, columns, empty_rows="skip"):
    """Return the documents as (ids, mask) and the number of empty rows."""
    encoder = Encoder(tokenizer, Encoding(format, columns, empty_rows))
    out = encoder.encode("f.jsonl", list(enumerate(rows, start=1)))
    bounds = np.cumsum(out.lengths)[:-1]
    mask = np.ones(len(out.ids), dtype=bool) if out.in_loss is None else out.in_loss
    documents = (
        zip(np.split(out.ids, bounds), np.split(mask, bounds), strict=True) if len(out.lengths) else []
    )
    return [(ids.tolist(), in_loss) for ids, in_loss in documents], out.empty


def texts(tokenizer, rows, **options):
    documents, _ = encode(tokenizer, "text", [{"text": text} for text in rows], ("text",), **options)
    return [ids for ids, _ in documents]


def in_loss(tokenizer, ids, mask) -> list[str]:
    """Return the text of each run of tokens in the loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


# ---- text


def test_exactly_one_end_token(tokenizer):
    plain, with_end = texts(tokenizer, ["One\ntwo", f"One\ntwo{EOS}"])
    assert plain == with_end == [*tokenizer.encode("One\ntwo"), tokenizer.eos_token_id]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos(adds_bos):
    tokenizer = build(bos="<s>", adds_bos=adds_bos)
    plain, with_bos = texts(tokenizer, ["Hello", "<s>Hello"])
    assert plain.count(tokenizer.bos_token_id) == adds_bos
    assert with_bos.count(tokenizer.bos_token_id) == 1
    for ids in (plain, with_bos):
        assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello"
        assert ids.count(tokenizer.eos_token_id) == 1


def test_the_tokenizer_is_not_changed(tokenizer):
    mine = build()
    mine.backend_tokenizer.enable_truncation(3)
    before = mine.backend_tokenizer.to_str()
    (ids,) = texts(mine, ["a long text of more than three tokens"])
    assert ids == [*tokenizer.encode("a long text of more than three tokens"), tokenizer.eos_token_id]
    assert mine.backend_tokenizer.to_str() == before


def test_empty_rows_are_counted_and_skipped_or_refused(tokenizer):
    rows = [{"text": "one"}, {"text": None}, {"text": ""}, {"text": " \n\t"}, {"text": "two"}]
    documents, empty = encode(tokenizer, "text", rows, ("text",))
    assert (len(documents), empty) == (2, 3)
    with pytest.raises(UserError, match=r"^f.jsonl:2: empty row"):
        encode(tokenizer, "text", rows, ("text",), empty_rows="error")
    rows = [{"p": "x", "c": ""}, {"p": None, "c": "y"}, {"p": "", "c": "y"}]
    assert encode(tokenizer, "prompt_completion", rows, ("p", "c"))[1] == 2
    assert encode(build("{{ messages }}"), "messages", [{"m": []}, {"m": None}], ("m",)) == ([], 2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"txet": "a", "id": 1}, "no column 'text'; the columns are: id, txet; did you mean 'txet'?"),
        ({}, "no column 'text'; the columns are: none"),
        ({"text": 5}, "column 'text' is int, not text"),
        ({"text": ["a"]}, "column 'text' is list, not text"),
        ({"text": "a\ud83d"}, "column 'text': character 2 is '\\ud83d', half of one"),
    ],
)
def test_a_wrong_row_is_told_with_its_place(tokenizer, row, said):
    with pytest.raises(UserError) as caught:
        encode(tokenizer, "text", [{"text": "good"}, row], ("text",))
    assert str(caught.value) == f"f.jsonl:2: {said}"


def quickstart_text(characters: int) -> str:
    lines = (QUICKSTART / "data" / "factbook_docs_train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(json.loads(line)["text"] for line in lines)
    return (text * (characters // len(text) + 1))[:characters]


@pytest.mark.parametrize("limit", [7, 100, 1000])
def test_pieces_are_cut_where_tokens_end(tokenizer, limit):
    text = quickstart_text(20_000) + "\n\n  indented\n\n\n" + "x" * 2500 + "\u00fc\U0001f600" * 50
    pieces = pieces_of(text, limit)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)
    if limit == 1000:
        text = quickstart_text(20_000)
        pieces = pieces_of(text, limit)
        assert len(pieces) > 15
        flat = [token for piece in pieces for token in tokenizer.encode(piece)]
        assert flat == tokenizer.encode(text)
        assert sum(piece.endswith("\n") for piece in pieces) > len(pieces) // 2


def test_pieces_are_not_cut_inside_white_space(tokenizer):
    paragraph = "One line.\nTwo lines,\n\n    an indented one.\n\n\n  - and\n  - a list \n of  items\n\n"
    text = paragraph * 20
    for limit in range(200, 300, 7):
        pieces = pieces_of(text, limit)
        assert len(pieces) > 5
        # Other tokenizers than this one take a run of white space as one token.
        for left, right in itertools.pairwise(pieces):
            assert (re.search(r"\S\n$", left) and right[0].strip()) or (left[-1].strip() and right[1].strip())
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize(
    "text", ["aaa\n\nbbb\n\nccc", "aaa  bbb  ccc", "aaa \n bbb \n ccc", " " * 30, "x" * 30]
)
def test_pieces_of_texts_without_a_good_place(text):
    pieces = pieces_of(text, 6)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 6 for piece in pieces)


def test_a_line_of_megabytes(tokenizer):
    text = quickstart_text(3_000_000)
    started = time.perf_counter()
    (ids,) = texts(tokenizer, [text])
    assert time.perf_counter() - started < 15
    assert tokenizer.decode(ids) == text + EOS
    word = "x" * 300_000
    assert tokenizer.decode(texts(tokenizer, [word])[0]) == word + EOS


# ---- prompt_completion


def completion(tokenizer, prompt, text):
    rows = [{"prompt": prompt, "completion": text}]
    ((ids, mask),), _ = encode(tokenizer, "prompt_completion", rows, ("prompt", "completion"))
    return ids, mask


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("text", ["Paris", " Paris ", "\n\nParis.\n", "\U0001f600 \u00fc", f"Paris{EOS}"])
@pytest.mark.parametrize("prompt", ["Capital of France: ", "Capital?\n", "\U0001f600", ""])
def test_only_the_completion_and_its_end_are_in_the_loss(prompt, text, adds_bos):
    tokenizer = build(bos="<s>", adds_bos=adds_bos)
    ids, mask = completion(tokenizer, prompt, text)
    end = "" if text.endswith(EOS) else EOS
    assert tokenizer.decode(ids) == ("<s>" if adds_bos else "") + prompt + text + end
    assert ids.count(tokenizer.eos_token_id) == 1
    (shown,) = in_loss(tokenizer, ids, mask)
    assert mask[-1]
    # All of the completion, and of the prompt at most the rest of one token that straddles the edge.
    assert shown.endswith(text + end)
    extra = shown.removesuffix(text + end)
    assert prompt.endswith(extra) and len(extra) < len(tokenizer.decode(ids[int(np.argmax(mask))]))


def test_a_token_over_the_edge_is_in_the_loss(tokenizer):
    assert "\u0120government" in tokenizer.tokenize("The government of France")
    ids, mask = completion(tokenizer, "The gover", "nment of France")
    assert in_loss(tokenizer, ids, mask) == [f" government of France{EOS}"]
    # White space as well, which the post-processor of GPT-2 and Llama 3 cuts off the offsets.
    tokenizer = build()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for prompt, text in (("Q: x ", " \u00fc"), ("Q: x  ", "  \n\n y  ")):
        ids, mask = completion(tokenizer, prompt, text)
        (shown,) = in_loss(tokenizer, ids, mask)
        assert shown.endswith(text + EOS)


# ---- chat

GENERATION = {
    "no markers": ("", "", "", ""),
    "around the text": ("{% generation %}", "{% endgeneration %}", "", ""),
    "around text and end": ("{% generation %}", "", "{% endgeneration %}", ""),
    "around text, end and line end": ("{% generation %}", "", "", "{% endgeneration %}"),
}


def chatml(marks=("", "", "", "")) -> str:
    on, a, b, c = marks
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        + f"{on}{{{{ m.content }}}}{a}<|im_end|>{b}{{{{ '\\n' }}}}{c}"
        + "{% else %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>{{ '\\n' }}{% endif %}{% endfor %}"
    )


def llama3(marks=("", "", "", "")) -> str:
    on, a, b, c = marks
    return (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' }}"
        + f"{{% if m.role == 'assistant' %}}{on}{{{{ m.content | trim }}}}{a}<|eot_id|>{b}{c}"
        + "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    )


def mistral(marks=("", "", "", "")) -> str:
    on, a, b, c = marks
    return (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set system = messages[0].content + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ (system if loop.first else '') + m.content }} [/INST]"
        + f"{{% else %}} {on}{{{{ m.content }}}}{a}{{{{ eos_token }}}}{b}{c}{{% endif %}}{{% endfor %}}"
    )


# Template, special tokens, BOS, end of an assistant's turn, whether a text is stripped.
FAMILIES = {
    "chatml": (chatml, ["<|im_start|>", "<|im_end|>"], None, "<|im_end|>", False),
    "llama3": (
        llama3,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
        True,
    ),
    "mistral": (mistral, ["[INST]", "[/INST]"], "<s>", EOS, False),
}


def chat(*turns):
    """`chat("user: hi", "assistant: hello")`."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


CHATS = {
    "one turn": chat("user: Capital of France?", "assistant: It is Paris."),
    "system": chat("system: Be brief.", "user: Capital?", "assistant: Paris."),
    "several turns": chat(
        "system: Be brief.",
        "user: One?",
        "assistant: First.",
        "user: Two?\nAnd?",
        "assistant: Second\n\nline.",
    ),
    "same text twice": chat("user: a", "assistant: Yes.", "user: b", "assistant: Yes."),
    "text of the user": chat("user: Say Yes. now", "assistant: Yes.", "user: Yes.", "assistant: Yes. now"),
    "emoji": chat(
        "user: \U0001f600?", "assistant: \U0001f1eb\U0001f1f7 \u00fc\u00df \u4f60\u597d \U0001f600"
    ),
    "white space": chat("user: a", "assistant:   Yes. \n", "user: b", "assistant: No.  "),
    "user last": chat("user: a", "assistant: Yes.", "user: thanks"),
    "empty": chat("user: a", "assistant: ", "user: b", "assistant: Yes."),
    "empty last": chat("user: a", "assistant: Yes.", "user: b", "assistant: "),
    "special tokens typed": chat(
        "user: <|im_end|><|eot_id|>[INST]", "assistant: Odd.", "user: b", "assistant: x"
    ),
}


def masked(tokenizer, messages):
    ((ids, mask),), _ = encode(tokenizer, "messages", [{"messages": messages}], ("messages",))
    return ids, mask


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("marks", GENERATION)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_loss_are_the_replies_and_their_turn_ends(family, marks, adds_bos):
    template, specials, bos, turn_end, stripped = FAMILIES[family]
    tokenizer = build(template(GENERATION[marks]), specials, bos, adds_bos and bos is not None)
    for name, messages in CHATS.items():
        ids, mask = masked(tokenizer, messages)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        expected = [(reply.strip() if stripped else reply) + turn_end for reply in replies]
        shown = in_loss(tokenizer, ids, mask)
        assert len(shown) == len(expected), name
        for text, wanted in zip(shown, expected, strict=True):
            # " Paris" is one token: the space that this template puts before a reply belongs to it.
            assert text == wanted or (family == "mistral" and text == f" {wanted}"), name
        assert mask[-1]
        if bos:
            assert ids.count(tokenizer.bos_token_id) == 1
        # The tokens are those of the template, and nothing is lost before the last reply's end.
        last = max(index for index, m in enumerate(messages) if m["role"] == "assistant")
        whole = tokenizer.apply_chat_template(messages[: last + 1], tokenize=False)
        assert whole.rstrip("\n") == tokenizer.decode(ids), name


@pytest.mark.parametrize("marks", GENERATION)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_without_a_reply_has_nothing_in_the_loss(family, marks):
    template, specials, bos, *_ = FAMILIES[family]
    tokenizer = build(template(GENERATION[marks]), specials, bos)
    ids, mask = masked(tokenizer, chat("user: anyone?"))
    assert ids and not mask.any()


def test_white_space_tokens_of_a_reply_are_in_the_loss():
    """With offsets as GPT-2's post-processor trims them, they would be lost."""
    tokenizer = build(chatml(), FAMILIES["chatml"][1])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids, mask = masked(tokenizer, chat("user: a", "assistant:    Yes.\n\n   "))
    assert in_loss(tokenizer, ids, mask) == ["   Yes.\n\n   <|im_end|>"]


NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


def test_a_template_without_turn_ends_gets_the_end_token():
    tokenizer = build(NO_END)
    ids, mask = masked(tokenizer, chat("user: a", "assistant: One.", "user: b", "assistant: Two."))
    assert [text.strip(" ") for text in in_loss(tokenizer, ids, mask)] == ["One.", f"Two.{EOS}"]
    assert tokenizer.decode(ids) == f"user: a\nassistant: One.\nuser: b\nassistant: Two.{EOS}"
    ids, mask = masked(tokenizer, chat("user: a", "assistant: "))
    assert in_loss(tokenizer, ids, mask) == [EOS]


def test_the_next_role_is_not_the_end_of_a_turn():
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    tokenizer = build(template, ["<|user|>", "<|assistant|>"])
    for last in ([], chat("user: c")):
        messages = chat("user: a", "assistant: One.", "user: b", "assistant: Two.")
        ids, mask = masked(tokenizer, messages + last)
        assert in_loss(tokenizer, ids, mask) == ["One.", f"Two.{EOS}"]


def test_an_end_after_the_last_turn_only():
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{{ eos_token }}"
    tokenizer = build(template, ["<|user|>", "<|assistant|>"])
    ids, mask = masked(tokenizer, chat("user: a", "assistant: One.", "user: b", "assistant: Two."))
    assert in_loss(tokenizer, ids, mask) == ["One.", f"Two.{EOS}"]
    assert ids.count(tokenizer.eos_token_id) == 1


def test_an_empty_reply_inside_a_token():
    tokenizer = build("{% for m in messages %}{{ 'the gover' + m.content + 'nment' }}{% endfor %}")
    ids, mask = masked(tokenizer, chat("user:  x ", "assistant: "))
    assert in_loss(tokenizer, ids, mask) == [EOS]


def test_white_space_before_a_turn_end_belongs_to_it():
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n<|end|>\\n' }}{% endfor %}"
    tokenizer = build(template, ["<|end|>"])
    ids, mask = masked(tokenizer, chat("user: a", "assistant: One.", "user: b", "assistant: Two."))
    assert [text.strip(" ") for text in in_loss(tokenizer, ids, mask)] == ["One.\n<|end|>", "Two.\n<|end|>"]


@pytest.mark.parametrize("marks", GENERATION)
def test_a_turn_end_that_is_not_flagged_special(marks):
    tokenizer = build(chatml(GENERATION[marks]))
    tokenizer.add_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    ids, mask = masked(tokenizer, chat("user: a", "assistant: One.", "user: b", "assistant: Two."))
    assert in_loss(tokenizer, ids, mask) == ["One.<|im_end|>", "Two.<|im_end|>"]


def test_markers_around_text_that_ends_with_another_added_token():
    tokenizer = build(chatml(GENERATION["around the text"]), FAMILIES["chatml"][1])
    tokenizer.add_tokens([AddedToken("</tool_call>")])
    ids, mask = masked(tokenizer, chat("user: a", "assistant: call</tool_call>"))
    assert in_loss(tokenizer, ids, mask) == ["call</tool_call><|im_end|>"]


# Earlier turns lose their thinking, as Qwen3's template does it.
THINKING = chatml().replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or '</think>' not in m.content"
    " else m.content.split('</think>')[-1].lstrip('\\n') }}",
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (chatml().replace("m.content }}", "m.content | upper }}", 1), CHATS["one turn"]),
        (chatml().replace("m.content }}", "m.content | replace('i', 'j') }}", 1), CHATS["several turns"]),
        (
            THINKING,
            chat("user: a", "assistant: <think>\nhm\n</think>\n\nYes.", "user: b", "assistant: No."),
        ),
        (
            chatml().replace("<|im_end|>", "{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}<|im_end|>", 1),
            [*chat("user: a"), {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
        ),
        ("{{ messages[0].content }}", CHATS["one turn"]),
        (chatml() + "{{ messages[-1].content }}", CHATS["one turn"]),
    ],
    ids=["upper", "replace", "thinking", "tool calls", "reply left out", "reply repeated"],
)
def test_a_template_that_changes_replies_is_refused(template, messages):
    with pytest.raises(UserError) as caught:
        masked(build(template, FAMILIES["chatml"][1]), messages)
    assert str(caught.value).startswith("f.jsonl:1: the chat template changes an assistant's text")
    assert "{% generation %}" in str(caught.value)


def test_thinking_of_the_last_turn_is_in_the_loss():
    tokenizer = build(THINKING, FAMILIES["chatml"][1])
    reply = "<think>\nhm\n</think>\n\nYes."
    ids, mask = masked(tokenizer, chat("user: a", f"assistant: {reply}"))
    assert in_loss(tokenizer, ids, mask) == [f"{reply}<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            [{"from": "human", "value": "a"}],
            "a message is an object with 'role' and 'content'; this one is: from",
        ),
        (["a"], "a message is an object with 'role' and 'content'; this one is: str"),
        ([{"role": "user", "content": 5}], "a message's 'content' is int, not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part of a message's 'content' is not text"),
        (chat("assistant: a", "user: b"), "the chat template refuses the messages: roles must alternate"),
        (
            chat("user: \ud83d", "assistant: b"),
            "a message's 'content': character 1 is '\\ud83d', half of one",
        ),
    ],
)
def test_wrong_messages_are_told_with_their_place(messages, said):
    tokenizer = build(mistral(), ["[INST]", "[/INST]"])
    with pytest.raises(UserError) as caught:
        masked(tokenizer, messages)
    assert str(caught.value).startswith(f"f.jsonl:1: {said}")


def test_content_in_parts_and_fields_without_a_value():
    template = (
        "{% for m in messages %}{{ 'tools' if 'tool_calls' in m }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = build(template, ["<|im_end|>"])
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": " two"}]
    messages = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": parts, "tool_calls": None},
    ]
    ids, mask = masked(tokenizer, messages)
    assert tokenizer.decode(ids) == "a<|im_end|>One two<|im_end|>"
    assert in_loss(tokenizer, ids, mask) == ["One two<|im_end|>"]


def test_a_sentencepiece_like_tokenizer():
    words = ["\u2581a", "\u2581It", "\u2581is", "\u2581Paris", "\u2581:", "user", "assistant", ":", "."]
    pieces = [("<unk>", 0.0), *((word, -1.0) for word in words), *((c, -5.0) for c in "\u2581:.userIti")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    ids, mask = masked(tokenizer, chat("user: a", "assistant: It is Paris.", "user: a", "assistant: a"))
    assert [text.strip(" ") for text in in_loss(tokenizer, ids, mask)] == ["It is Paris.</s>", "a</s>"]
    ids, mask = completion(tokenizer, "a", " is Paris")
    assert [text.strip(" ") for text in in_loss(tokenizer, ids, mask)] == ["is Paris</s>"]
