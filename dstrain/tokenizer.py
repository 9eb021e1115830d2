"""Train a byte-level BPE tokenizer on local text, and save it as a Hugging Face folder."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dstrain.errors import UserError

END = "<|endoftext|>"


def train_tokenizer(texts: Iterator[str], vocab_size: int, output: Path) -> int:
    """Train on `texts` and write the folder `output`. Returns the size of the vocabulary.

    Byte-level, so every text can be encoded; `<|endoftext|>` ends a document. Raises UserError if the size
    does not hold the 256 bytes and the end token.
    """
    if vocab_size < 257:
        raise UserError(f"--vocab-size={vocab_size}: 256 bytes and the end token need at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(output)
    return len(wrapped)
