"""The first example as the model will see it: its documents decoded, and which text is in the loss."""

from collections.abc import Mapping
from typing import Any

import torch

_SHOWN_CHARACTERS = 1500


def preview(tokenizer: Any, batch: Mapping[str, torch.Tensor]) -> str:
    """Return the first row of a batch as text; [[ ]] encloses what is in the loss."""
    documents = batch["document_ids"][0]
    lines = []
    for document in range(1, int(documents.max()) + 1):
        here = (documents == document).nonzero().flatten().tolist()
        ids = batch["input_ids"][0, here].tolist()
        # A label stands one place before its token; the first token of a document is nobody's label.
        in_loss = [False, *(batch["labels"][0, here[:-1]] >= 0).tolist()]
        lines.append(f"--- document {document}: {len(ids)} tokens, {sum(in_loss)} in the loss")
        lines.append(_marked(tokenizer, ids, in_loss))
    text = "\n".join(lines)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."


def _marked(tokenizer: Any, ids: list[int], in_loss: list[bool]) -> str:
    parts, start = [], 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or in_loss[index] != in_loss[start]:
            text = tokenizer.decode(ids[start:index])
            parts.append(f"[[{text}]]" if in_loss[start] else text)
            start = index
    return "".join(parts)
