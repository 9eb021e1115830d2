"""Rows -> token ids and a mask of the tokens that are in the loss. Runs in worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dstrain.data import chat
from dstrain.errors import UserError

# A text longer than this is encoded in pieces, cut at line ends or spaces, so that one line of a hundred
# megabytes takes bounded memory.
PIECE_CHARACTERS = 1_000_000

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
        self.backend = self.tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        self.eos: int = self.tokenizer.eos_token_id
        # BOS, if this tokenizer puts it before a text by itself.
        probe, bos = self.backend.encode("a", add_special_tokens=True).ids, self.tokenizer.bos_token_id
        self.first: int | None = bos if bos is not None and probe and probe[0] == bos else None
        added = self.tokenizer.added_tokens_decoder
        self.turn_ends = np.array([token for token in added if added[token].special], dtype=np.int64)
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
                found = ", ".join(sorted(map(str, row))) or "none"
                raise UserError(f"{file}:{number}: no column {column!r}; the columns are: {found}")

    def _is_empty(self, file: str, number: int, row: Row) -> bool:
        for column in self.encoding.columns:
            value = row[column]
            expected = list if self.encoding.format == "messages" else str
            if value is None:
                return True
            if not isinstance(value, expected):
                kind = "a list of messages" if expected is list else "text"
                raise UserError(f"{file}:{number}: column {column!r} is {type(value).__name__}, not {kind}")
        last = row[self.encoding.columns[-1]]
        return not (last.strip() if isinstance(last, str) else last)

    def _texts(self, file: str, rows: Sequence[tuple[int, Row]]) -> list[tuple[np.ndarray, None]]:
        column = self.encoding.columns[0]
        pieces = [pieces_of(row[column]) for _, row in rows]
        flat = iter(
            self.backend.encode_batch_fast([p for group in pieces for p in group], add_special_tokens=False)
        )
        documents = []
        for group in pieces:
            ids = np.concatenate([np.array(next(flat).ids, dtype=self.dtype) for _ in group])
            documents.append((self._framed(ids)[0], None))
        return documents

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
        template = self.tokenizer.get_chat_template()
        texts, spans = [], []
        for number, row in rows:
            try:
                messages = [_message(message) for message in row[column]]
                text, assistant = chat.render(messages, template, self.tokenizer.special_tokens_map)
            except UserError as error:
                raise UserError(f"{file}:{number}: {error}") from None
            texts.append(text)
            spans.append(assistant)
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        return [self._chat(*one) for one in zip(texts, encodings, spans, strict=True)]

    def _chat(self, text: str, encoded: Any, spans: Sequence[chat.Span]) -> tuple[np.ndarray, np.ndarray]:
        """Mask the assistant's tokens and the end of each of its turns; cut off what follows the last."""
        ids = np.array(encoded.ids, dtype=self.dtype)
        starts, ends = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        special = np.isin(ids, self.turn_ends)
        blank = np.array([text[start:end].isspace() for start, end in encoded.offsets], dtype=bool)
        in_loss = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            inside = (ends > start) & (starts < end)
            in_loss |= inside
            solid = np.flatnonzero(inside & ~blank)
            if len(solid) and special[solid[-1]]:  # generation markers around the turn's end as well
                in_loss[solid[-1] + 1 : np.searchsorted(starts, end)] = False
                continue
            after = int(np.searchsorted(starts, end))
            while after < len(ids) and blank[after] and not special[after]:
                after += 1
            if after < len(ids) and special[after]:
                in_loss[after] = True
        if not in_loss.any():
            return ids, in_loss
        kept = int(np.flatnonzero(in_loss)[-1]) + 1
        ids, in_loss = ids[:kept], in_loss[:kept]
        if not special[kept - 1]:  # the template marks no end of a turn: the end token does
            ids, in_loss = np.append(ids, self.dtype(self.eos)), np.append(in_loss, True)
        return ids, in_loss

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
    """Cut a long text at line ends, else before spaces, else anywhere, into pieces of at most `limit`."""
    pieces, start = [], 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start + limit // 2, start + limit) + 1
        if cut <= start:
            cut = text.rfind(" ", start + limit // 2, start + limit)
        if cut <= start:
            cut = start + limit
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _message(message: Any) -> chat.Message:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise UserError("a message is an object with 'role' and 'content'")
    content = message["content"]
    if isinstance(content, list):  # [{"type": "text", "text": ...}, ...]
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return message | {"content": "" if content is None else content}
