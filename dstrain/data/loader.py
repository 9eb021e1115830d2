"""Sequences -> micro batches, by data-parallel rank.

A batch holds four (micro, length) int64 tensors:

    input_ids      tokens; padding where document_ids is 0
    labels         the next token of the same document, -100 where it is not in the loss: already shifted
    position_ids   from 0 in each document
    document_ids   1, 2, ... in each row; 0 is padding
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dstrain.data.order import draw, epoch_shares
from dstrain.data.pack import Segment, Sequences

Batch = dict[str, torch.Tensor]
Row = tuple[Sequences, list[Segment]]

IGNORE = -100  # the label of a token that is not in the loss, as everywhere in PyTorch


@dataclass
class Loader:
    """An endless training stream. `position` counts the sequences drawn by all ranks together."""

    sources: Sequence[Sequences]
    seed: int
    micro: int
    gas: int
    dp_rank: int
    dp_size: int
    width: int | None  # of packed rows; None pads each micro batch to its longest row
    pad_id: int
    position: int = 0

    def __post_init__(self) -> None:
        self._sizes = [len(source) for source in self.sources]
        self._weights = [source.tokens.weight for source in self.sources]
        self._rows: list[list[Row]] = []

    @property
    def epoch_sequences(self) -> int:
        """Sequences in one pass over the mixture."""
        return sum(epoch_shares(self._sizes, self._weights))

    def next_step(self) -> list[Batch]:
        """Return this rank's micro batches of the next optimizer step."""
        step = np.arange(self.gas * self.dp_size * self.micro) + self.position
        mine = step.reshape(self.gas, self.dp_size, self.micro)[:, self.dp_rank]  # (gas, micro)
        source, item = draw(mine.reshape(-1), self._sizes, self._weights, self.seed)
        rows = [
            (self.sources[s], self.sources[s].segments(int(i))) for s, i in zip(source, item, strict=True)
        ]
        self._rows = [rows[start : start + self.micro] for start in range(0, len(rows), self.micro)]
        self.position += len(step)
        return [collate(rows, self.width, self.pad_id) for rows in self._rows]

    def places(self) -> list[str]:
        """Return `file:line` of every document in this rank's last step, each once."""
        found = [
            sequences.tokens.place(s.document) for rows in self._rows for sequences, row in rows for s in row
        ]
        return list(dict.fromkeys(found))

    def state(self) -> dict[str, int]:
        """Return what `load` needs to go on from here."""
        return {"position": self.position}

    def load(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken; nothing is read to get there."""
        self.position = state["position"]


def eval_batches(
    sources: Sequence[Sequences], micro: int, dp_rank: int, dp_size: int, width: int | None, pad_id: int
) -> Iterator[Batch]:
    """Yield this rank's share of a pass over the held-out data; every rank gets equally many batches.

    A rank that has none left gets a copy of a row without labels, so that ranks stay in lock-step.
    """
    places = [(source, index) for source in sources for index in range(len(source))]
    micro_batches = [places[start : start + micro] for start in range(0, len(places), micro)]
    rounds = -(-len(micro_batches) // dp_size)
    for number in range(rounds):
        mine = number * dp_size + dp_rank
        here = micro_batches[mine] if mine < len(micro_batches) else places[:1]
        batch = collate([(source, source.segments(index)) for source, index in here], width, pad_id)
        if mine >= len(micro_batches):
            batch["labels"].fill_(IGNORE)
        yield batch


def collate(rows: Sequence[Row], width: int | None, pad_id: int) -> Batch:
    """Lay rows of segments into one batch, padded on the right to `width` or to the longest row."""
    if width is None:
        width = max(sum(s.stop - s.start for s in segments) for _, segments in rows)
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    document_ids = np.zeros(shape, dtype=np.int64)
    for row, (sequences, segments) in enumerate(rows):
        column = 0
        for number, segment in enumerate(segments, start=1):
            length = segment.stop - segment.start
            here = slice(column, column + length)
            # One more than the input where the document goes on behind the sequence: it is the last label.
            ahead = min(segment.stop + 1, segment.document_stop)
            tokens = sequences.tokens.stream[segment.start : ahead].astype(np.int64)
            input_ids[row, here] = tokens[:length]
            targets = tokens[1:]
            if sequences.tokens.in_loss is not None:
                bits = _bits(sequences.tokens.in_loss, segment.start + 1, ahead)
                targets = np.where(bits, targets, IGNORE)
            labels[row, column : column + len(targets)] = targets
            position_ids[row, here] = np.arange(length)
            document_ids[row, here] = number
            column += length
        # Padding goes on counting from the last document if it is alone, so that a padded row needs no mask:
        # causal attention keeps real tokens from seeing what is on their right.
        tail = width - column
        position_ids[row, column:] = np.arange(tail) + (column if len(segments) == 1 else 0)
    arrays = (input_ids, labels, position_ids, document_ids)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


def _bits(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    first = start // 8
    bits = np.unpackbits(np.asarray(packed[first : -(-stop // 8)]), bitorder="little")
    return bits[start - first * 8 : stop - first * 8].astype(bool)
