"""Rows -> token ids and a mask of the tokens that are in the loss. Runs in worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dstrain.data import chat
from dstrain.errors import UserError, nearest

# A text longer than this is encoded in pieces, cut at line ends or spaces and so many at a time, so that one
# line of a hundred megabytes takes bounded memory.
PIECE_CHARACTERS = 100_000
_PIECES_AT_ONCE = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Encoding:
    """How rows become tokens; all of it is part of the cache's key."""

    format: str
    columns: tuple[str, ...]
    empty_rows: str


@dataclass
class Encoded:
    """A batch of documents, flat."""

    ids: np.ndarray  # (tokens,) unsigned
    in_loss: np.ndarray | None  # (tokens,) bool; None where every token is
    lengths: np.ndarray  # (documents,) int64
    places: np.ndarray  # (documents,) int64, the row number in its file
    empty: int = 0


@dataclass
class Encoder:
    """A tokenizer made ready: `encode(rows)` gives an `Encoded`."""

    tokenizer: Any
    encoding: Encoding

    def __post_init__(self) -> None:
        # A copy: the user's tokenizer keeps its settings, which are part of the cache's key.
        self.backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        self.backend.no_padding()
        self.backend.no_truncation()
        self.eos: int = self.tokenizer.eos_token_id
        # BOS, if this tokenizer puts it before a text by itself.
        probe, bos = self.backend.encode("a", add_special_tokens=True).ids, self.tokenizer.bos_token_id
        self.first: int | None = bos if bos is not None and probe and probe[0] == bos else None
        self.backend.post_processor = None  # it would trim white space off the offsets
        added = self.tokenizer.added_tokens_decoder
        self.added = np.array(list(added), dtype=np.int64)
        self.special = np.array([token for token in added if added[token].special], dtype=np.int64)
        self.template = self.tokenizer.get_chat_template() if self.encoding.format == "messages" else ""
        self.marked = chat.has_markers(self.template)
        self.dtype = token_dtype(len(self.tokenizer))

    def encode(self, file: str, numbered: Sequence[tuple[int, Row]]) -> Encoded:
        """Encode rows of one file. Raises UserError that names the file and the row."""
        rows: list[tuple[int, Row]] = []
        empty = 0
        for number, row in numbered:
            self._check_columns(file, number, row)
            if self._is_empty(file, number, row):
                if self.encoding.empty_rows == "error":
                    raise UserError(
                        f"{file}:{number}: empty row (data.empty_rows: skip counts and skips them)"
                    )
                empty += 1
            else:
                rows.append((number, row))
        one = {"text": self._texts, "messages": self._chats, "prompt_completion": self._completions}
        documents = one[self.encoding.format](file, rows)
        return self._flat(documents, [number for number, _ in rows], empty)

    def _check_columns(self, file: str, number: int, row: Row) -> None:
        for column in self.encoding.columns:
            if column not in row:
                names = sorted(map(str, row))
                found = f"the columns are: {', '.join(names) or 'none'}{nearest(column, names)}"
                raise UserError(f"{file}:{number}: no column {column!r}; {found}")

    def _is_empty(self, file: str, number: int, row: Row) -> bool:
        for column in self.encoding.columns:
            value = row[column]
            expected = list if self.encoding.format == "messages" else str
            if value is None:
                return True
            if not isinstance(value, expected):
                kind = "a list of messages" if expected is list else "text"
                raise UserError(f"{file}:{number}: column {column!r} is {type(value).__name__}, not {kind}")
            if isinstance(value, str):
                _check_text(value, f"{file}:{number}: column {column!r}")
        last = row[self.encoding.columns[-1]]
        return not (last.strip() if isinstance(last, str) else last)

    def _texts(self, file: str, rows: Sequence[tuple[int, Row]]) -> list[tuple[np.ndarray, None]]:
        column = self.encoding.columns[0]
        pieces = [pieces_of(row[column]) for _, row in rows]
        flat = self._pieces([piece for group in pieces for piece in group])
        return [(self._framed(np.concatenate([next(flat) for _ in group]))[0], None) for group in pieces]

    def _pieces(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        for start in range(0, len(texts), _PIECES_AT_ONCE):
            some = texts[start : start + _PIECES_AT_ONCE]
            for encoded in self.backend.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoded.ids, dtype=self.dtype)

    def _framed(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Put the tokenizer's own first token and the end token around a document, each once.

        Returns the ids and how many tokens were put before.
        """
        first = [] if self.first is None or (len(ids) and ids[0] == self.first) else [self.first]
        last = [] if len(ids) and ids[-1] == self.eos else [self.eos]
        return np.concatenate([np.array(first, self.dtype), ids, np.array(last, self.dtype)]), len(first)

    def _completions(self, file: str, rows: Sequence[tuple[int, Row]]) -> list[tuple[np.ndarray, np.ndarray]]:
        prompt, completion = self.encoding.columns
        texts = [row[prompt] + row[completion] for _, row in rows]
        documents = []
        for (_, row), encoded in zip(
            rows, self.backend.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            ids, before = self._framed(np.array(encoded.ids, dtype=self.dtype))
            in_loss = np.ones(len(ids), dtype=bool)  # the end token among them
            in_loss[:before] = False
            # A token that straddles the edge is the completion's: generation has to produce it.
            for index, (_, end) in enumerate(encoded.offsets):
                in_loss[before + index] = end > len(row[prompt])
            documents.append((ids, in_loss))
        return documents

    def _chats(self, file: str, rows: Sequence[tuple[int, Row]]) -> list[tuple[np.ndarray, np.ndarray]]:
        column = self.encoding.columns[0]
        texts, spans = [], []
        for number, row in rows:
            try:
                messages = [_message(message) for message in row[column]]
                text, assistant = chat.render(messages, self.template, self.tokenizer.special_tokens_map)
            except UserError as error:
                raise UserError(f"{file}:{number}: {error}") from None
            texts.append(text)
            spans.append(assistant)
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        return [self._chat(*one) for one in zip(texts, encodings, spans, strict=True)]

    def _chat(self, text: str, encoded: Any, spans: Sequence[chat.Span]) -> tuple[np.ndarray, np.ndarray]:
        """Mask the assistant's tokens and the end of each of its turns; cut off what follows the last.

        The end of a turn is the added token that follows the last assistant's text, white space before it
        included. If the template has none, the end token is put there.
        """
        ids = np.array(encoded.ids, dtype=self.dtype)
        in_loss = np.zeros(len(ids), dtype=bool)
        if not spans:
            return ids, in_loss
        offsets = encoded.offsets
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        blank = np.array([text[start:end].isspace() for start, end in offsets], dtype=bool)
        ending, special = np.isin(ids, self.added) & ~blank, np.isin(ids, self.special)
        solid = np.append(np.flatnonzero(~blank), len(ids))

        # Token ranges of the spans; a token that straddles an edge is inside, unless the text is empty.
        ranges = []
        for start, end in spans:
            stop = int(np.searchsorted(starts, end))
            ranges.append((int(np.searchsorted(ends, start, "right")) if end > start else stop, stop))
        last, after = _around(solid, *ranges[-1])
        follows = after < len(ids) and bool(ending[after])
        if self.marked and last >= 0 and (special[last] or (ending[last] and not follows)):
            # The markers enclose the turn's end. White space behind it is not the assistant's.
            ranges = [(first, _around(solid, first, stop)[0] + 1 or stop) for first, stop in ranges]
        elif follows:
            turn_end = ids[after]
            afters = [_around(solid, *one)[1] for one in ranges]
            ranges = [
                (first, after + 1 if after < len(ids) and ids[after] == turn_end else stop)
                for (first, stop), after in zip(ranges, afters, strict=True)
            ]
        else:
            first, stop = ranges[-1]
            ids, in_loss = ids[:stop], in_loss[:stop]
            if first == stop or ids[-1] != self.eos:
                ids, in_loss = np.append(ids, self.dtype(self.eos)), np.append(in_loss, True)
        for first, stop in ranges:
            in_loss[first:stop] = True
        kept = int(np.flatnonzero(in_loss)[-1]) + 1
        return ids[:kept], in_loss[:kept]

    def _flat(
        self, documents: Sequence[tuple[np.ndarray, Any]], places: Sequence[int], empty: int
    ) -> Encoded:
        ids = [ids for ids, _ in documents]
        masks = [mask for _, mask in documents if mask is not None]
        return Encoded(
            ids=np.concatenate(ids) if ids else np.zeros(0, self.dtype),
            in_loss=np.concatenate(masks) if masks else None,
            lengths=np.array([len(part) for part in ids], dtype=np.int64),
            places=np.array(places, dtype=np.int64),
            empty=empty,
        )


def token_dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """Return the smallest unsigned type that holds every token id."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def pieces_of(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """Cut a long text behind line ends, else before spaces, else anywhere, into pieces of at most `limit`."""
    pieces, start = [], 0
    while len(text) - start > limit:
        low, high = start + limit // 2, start + limit
        cut = _lone(text, "\n", low, high) + 1 or _lone(text, " ", low, high)
        if cut <= start:
            cut = high
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _lone(text: str, mark: str, low: int, high: int) -> int:
    """Return the last place in [low, high) of `mark` without white space around it, or -1.

    Tokenizers treat a run of white space as one, so a cut inside it would give other tokens.
    """
    place = text.rfind(mark, low, high)
    while place >= 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind(mark, low, place)
    return place


def _around(solid: np.ndarray, first: int, stop: int) -> tuple[int, int]:
    """Return the last token in [first, stop) that is not white space, or -1, and the first such from stop."""
    index = int(np.searchsorted(solid, stop))
    inside = index > 0 and solid[index - 1] >= first
    return int(solid[index - 1]) if inside else -1, int(solid[index])


def _check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: character {error.start + 1} is {text[error.start]!r}, half of one"
        ) from None


def _message(message: Any) -> chat.Message:
    """Return the message with its content as one text and without the empty fields that parquet adds."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        found = ", ".join(map(str, message)) if isinstance(message, dict) else type(message).__name__
        raise UserError(f"a message is an object with 'role' and 'content'; this one is: {found}")
    content = message["content"]
    if isinstance(content, list):  # [{"type": "text", "text": ...}, ...]
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise UserError("a part of a message's 'content' is not text")
        content = "".join(parts)
    if not isinstance(content, str | None):
        raise UserError(f"a message's 'content' is {type(content).__name__}, not text")
    _check_text(content or "", "a message's 'content'")
    return {key: value for key, value in message.items() if value is not None} | {"content": content or ""}
