"""Documents -> sequences of at most `max_seq_length` tokens: which tokens of which documents go together.

Text is cut from the stream, so long documents are split and no token is lost. Chat and prompt_completion
examples stay whole and are packed best fit decreasing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from dstrain.data.prepare import Tokens
from dstrain.errors import UserError


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one document, in the coordinates of its source's stream."""

    start: int
    stop: int
    document: int
    document_stop: int  # where the document ends: the label of the last token may lie behind `stop`


@dataclass(frozen=True)
class Sequences:
    """The sequences of one source; `len()` of them, `segments(i)` each."""

    tokens: Tokens
    max_seq_length: int
    offsets: np.ndarray | None  # (sequences + 1,) into members, or chunks before each document; None: blocks
    members: np.ndarray | None  # documents, sequence after sequence; None: one document's chunks
    count: int
    too_long: int = 0  # examples dropped or cut for their length
    without_loss: int = 0  # examples dropped because no token of theirs is in the loss

    def __len__(self) -> int:
        return self.count

    def segments(self, index: int) -> list[Segment]:
        """Return the segments of one sequence, in order."""
        if self.members is not None:
            assert self.offsets is not None
            return [self._whole(int(d)) for d in self.members[self.offsets[index] : self.offsets[index + 1]]]
        if self.offsets is not None:
            return [self._chunk(index)]
        return self._block(index)

    def _bounds(self, document: int) -> tuple[int, int]:
        start = int(self.tokens.ends[document - 1]) if document else 0
        return start, int(self.tokens.ends[document])

    def _whole(self, document: int) -> Segment:
        start, stop = self._bounds(document)
        return Segment(start, min(stop, start + self.max_seq_length), document, stop)

    def _chunk(self, index: int) -> Segment:
        assert self.offsets is not None
        document = int(np.searchsorted(self.offsets, index, side="right")) - 1
        start, stop = self._bounds(document)
        start += (index - int(self.offsets[document])) * self.max_seq_length
        return Segment(start, min(stop, start + self.max_seq_length), document, stop)

    def _block(self, index: int) -> list[Segment]:
        position = index * self.max_seq_length
        end = min(position + self.max_seq_length, int(self.tokens.ends[-1]))
        document = int(np.searchsorted(self.tokens.ends, position, side="right"))
        segments = []
        while position < end:
            document_stop = int(self.tokens.ends[document])
            segments.append(Segment(position, min(document_stop, end), document, document_stop))
            position = segments[-1].stop
            document += 1
        return segments


def sequences(tokens: Tokens, max_seq_length: int, packing: bool, long_examples: str) -> Sequences:
    """Arrange one source's documents into sequences.

    long_examples: drop | truncate | error, for examples over `max_seq_length`. Raises UserError if an example
    is refused or none is left with a token in the loss.
    """
    if not tokens.whole:
        return _text(tokens, max_seq_length, packing)
    lengths = np.diff(tokens.ends, prepend=0)
    long = lengths > max_seq_length
    if long_examples == "error" and long.any():
        document = int(np.flatnonzero(long)[0])
        raise UserError(
            f"{tokens.place(document)}: example of {lengths[document]} tokens, over data.max_seq_length "
            f"{max_seq_length} (data.long_examples: drop or truncate)"
        )
    # The last token of a cut example still has a label: the first token that was cut off.
    silent = (tokens.first < 1) | (tokens.first > max_seq_length)
    kept = np.flatnonzero(~silent & ~(long if long_examples == "drop" else np.zeros_like(long)))
    if not len(kept):
        raise UserError(
            f"{tokens.name}: all labels are masked: of {len(lengths)} examples {int(long.sum())} are over "
            f"data.max_seq_length {max_seq_length} and {int(silent.sum())} have no token in the loss"
        )
    counts = {"too_long": int((long & ~silent).sum()), "without_loss": int(silent.sum())}
    if not packing:
        return Sequences(tokens, max_seq_length, np.arange(len(kept) + 1), kept, len(kept), **counts)
    file = tokens.folder / f"packs-{max_seq_length}-{long_examples}.npz"
    offsets, members = _cached_packs(file, kept, np.minimum(lengths[kept], max_seq_length), max_seq_length)
    return Sequences(tokens, max_seq_length, offsets, members, len(offsets) - 1, **counts)


def _text(tokens: Tokens, max_seq_length: int, packing: bool) -> Sequences:
    total = int(tokens.ends[-1])
    # n tokens hold n - 1 predictions, so a last sequence of a single token would hold none.
    if packing:
        offsets, count = None, -(-(total - 1) // max_seq_length)
    else:
        chunks = -(-(np.diff(tokens.ends, prepend=0) - 1) // max_seq_length)
        offsets = np.concatenate([[0], np.cumsum(chunks)])
        count = int(offsets[-1])
    if not count:
        raise UserError(f"{tokens.name}: no text has a second token, so there is nothing to predict")
    return Sequences(tokens, max_seq_length, offsets, None, count)


def _cached_packs(
    file: Path, documents: np.ndarray, lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, ...]:
    with FileLock(f"{file}.lock"):  # several ranks come here at once
        if not file.exists():
            offsets, order = best_fit_decreasing(lengths, capacity)
            temporary = file.with_suffix(".tmp.npz")
            np.savez(temporary, offsets=offsets, members=documents[order])
            temporary.replace(file)
    with np.load(file) as packs:
        return packs["offsets"], packs["members"]


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins: the longest first, each into the fullest bin that still holds it.

    lengths: (items,) in [1, capacity]. Returns (offsets (bins + 1,), items in bin order).
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set when some bin has room r
    for item in order:
        length = int(lengths[item])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(int(item))
        if room > length:
            by_room[room - length].append(chosen)
            rooms |= 1 << (room - length)
    offsets = np.cumsum([0, *(len(members) for members in bins)])
    return offsets, np.array([item for members in bins for item in members], dtype=np.int64)
