"""Documents to sequences to micro batches: nothing lost, nothing twice, documents isolated, ranks disjoint."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain import data
from dstrain.data import pack
from dstrain.data.loader import IGNORE, Loader, collate, eval_batches
from dstrain.data.order import draw, epoch_shares, permute
from dstrain.data.pack import Sequences, best_fit_decreasing, sequences
from dstrain.errors import UserError
from dstrain.model import CausalLMLoss
from dstrain.observe.preview import preview
from dstrain.recipe import Source


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny models only lose by more of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- text to sequences


def words(count: int, number: int) -> str:
    return " ".join(f"w{number}x{index}" for index in range(count))


TEXTS = [{"text": words(1 + (number * 7) % 23, number)} for number in range(30)] + [{"text": words(300, 99)}]


def rows_of(source: Sequences, pad_id: int = 0) -> list[dict[str, np.ndarray]]:
    """Return every sequence as a row of arrays."""
    batches = [collate([(source, source.segments(i))], None, pad_id) for i in range(len(source))]
    return [{name: tensor[0].numpy() for name, tensor in batch.items()} for batch in batches]


def predictions(source: Sequences) -> list[tuple[int, int]]:
    """Return (stream position of the predicted token, its id) for every label, checked against its input."""
    found = []
    for index in range(len(source)):
        row = {name: t[0] for name, t in collate([(source, source.segments(index))], None, 0).items()}
        column = 0
        for segment in source.segments(index):
            for offset in range(segment.stop - segment.start):
                position = segment.start + offset
                assert row["input_ids"][column] == source.tokens.stream[position]
                if row["labels"][column] != IGNORE:
                    found.append((position + 1, int(row["labels"][column])))
                column += 1
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("length", [2, 3, 16, 64, 10_000])
def test_every_token_of_a_text_is_predicted_once(tokens_of, length, packing):
    tokens = tokens_of(TEXTS)
    source = sequences(tokens, length, packing, "drop")
    found = predictions(source)
    starts = {0, *tokens.ends[:-1].tolist()}
    expected = [(p, int(tokens.stream[p])) for p in range(len(tokens.stream)) if p not in starts]
    assert found == expected
    rows = rows_of(source)
    assert all(len(row["input_ids"]) <= length for row in rows)
    assert all((row["labels"] != IGNORE).any() for row in rows)
    if packing:  # full but for the last one
        assert all(len(row["input_ids"]) == length for row in rows[:-1])


@pytest.mark.parametrize("packing", [True, False])
def test_the_inputs_of_all_sequences_decode_to_the_texts(tokens_of, tokenizer, packing):
    source = sequences(tokens_of(TEXTS), 16, packing, "drop")
    shown = ""
    for row in rows_of(source):
        last = row["labels"][-1]
        shown += tokenizer.decode(row["input_ids"])
        if not packing and last == tokenizer.eos_token_id:  # only predicted, never an input
            shown += tokenizer.decode([last])
    end = tokenizer.eos_token
    assert shown.removesuffix(end) + end == "".join(row["text"] + end for row in TEXTS)


def test_a_text_without_a_prediction(tokens_of, tokenizer):
    for packing in (True, False):
        with pytest.raises(UserError, match="nothing to predict"):
            sequences(tokens_of([{"text": tokenizer.eos_token}]), 8, packing, "drop")
    source = sequences(tokens_of([{"text": tokenizer.eos_token}, {"text": "a"}]), 8, False, "drop")
    assert [row["labels"].tolist() for row in rows_of(source)] == [[tokenizer.eos_token_id, IGNORE]]


# ---- examples to sequences

PAIRS = [
    {"prompt": words(1 + number % 5, number) + " ", "completion": words(1 + (number * 5) % 11, number)}
    for number in range(60)
]
PAIR = ("prompt_completion", ("prompt", "completion"))


@pytest.mark.parametrize("packing", [True, False])
def test_every_completion_is_predicted_once_and_examples_stay_whole(tokens_of, tokenizer, packing):
    tokens = tokens_of(PAIRS, *PAIR)
    source = sequences(tokens, 100, packing, "drop")
    seen = []
    for index in range(len(source)):
        row = {name: t[0] for name, t in collate([(source, source.segments(index))], None, 0).items()}
        for document in range(1, int(row["document_ids"].max()) + 1):
            here = row["document_ids"] == document
            assert row["position_ids"][here].tolist() == list(range(int(here.sum())))
            labels = row["labels"][here]
            seen.append(
                (tokenizer.decode(row["input_ids"][here]), tokenizer.decode(labels[labels >= 0]).strip())
            )
    end = tokenizer.eos_token
    expected = [(one["prompt"] + one["completion"] + end, one["completion"] + end) for one in PAIRS]
    assert sorted(seen) == sorted(expected)
    assert (source.too_long, source.without_loss) == (0, 0)
    if packing:
        used = int(tokens.ends[-1])
        assert len(source) <= math.ceil(used / 100) + 1


def test_long_examples(tokens_of, tokenizer):
    rows = [{"prompt": "p ", "completion": words(n, 0)} for n in (3, 30, 3)]
    rows.append({"prompt": words(30, 0), "completion": "c"})  # cut, it would have nothing in the loss
    tokens = tokens_of(rows, *PAIR)
    dropped = sequences(tokens, 40, True, "drop")
    assert (dropped.too_long, dropped.without_loss) == (1, 1)
    assert sorted(dropped.members.tolist()) == [0, 2]
    cut = sequences(tokens, 40, True, "truncate")
    assert (cut.too_long, cut.without_loss) == (1, 1)
    assert sorted(cut.members.tolist()) == [0, 1, 2]
    (whole,) = [row for row in rows_of(cut) if len(set(row["document_ids"])) == 1]
    assert len(whole["input_ids"]) == 40
    # The first token that was cut off is the last label.
    assert whole["labels"][-1] == tokens.stream[tokens.ends[0] + 40]
    with pytest.raises(UserError) as caught:
        sequences(tokens, 40, True, "error")
    length = int(tokens.ends[1] - tokens.ends[0])
    assert str(caught.value).startswith(
        f"{tokens.place(1)}: example of {length} tokens, over data.max_seq_length 40 (data.long_examples: drop"
    )


@pytest.mark.parametrize("packing", [True, False])
def test_all_labels_masked_is_an_error(tokens_of, packing):
    tokens = tokens_of([{"prompt": "p ", "completion": words(30, 0)}] * 3, *PAIR)
    with pytest.raises(
        UserError, match=r"all labels are masked: of 3 examples 3 are over data.max_seq_length 40"
    ):
        sequences(tokens, 40, packing, "drop")


def test_packs_are_cached_for_each_length(tokens_of, monkeypatch):
    tokens = tokens_of(PAIRS, *PAIR)
    short, long = (sequences(tokens, length, True, "drop") for length in (100, 200))
    assert len(short) > len(long)
    with monkeypatch.context() as patch:
        patch.setattr(pack, "best_fit_decreasing", None)
        for length, before in ((100, short), (200, long)):
            again = sequences(tokens, length, True, "drop")
            assert again.members.tolist() == before.members.tolist()
            assert again.offsets.tolist() == before.offsets.tolist()
    assert sorted(short.members.tolist()) == sorted(long.members.tolist()) == list(range(len(PAIRS)))


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_decreasing(seed):
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 200))
    lengths = random.integers(1, capacity + 1, size=int(random.integers(1, 2_000)))
    if seed % 2:  # short items, as chats are
        lengths = np.minimum(np.ceil(random.exponential(capacity / 8, size=len(lengths))), capacity).astype(
            int
        )
        lengths = np.maximum(lengths, 1)
    offsets, order = best_fit_decreasing(lengths, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    sums = np.add.reduceat(lengths[order], offsets[:-1])
    assert sums.max() <= capacity
    assert len(sums) == len(offsets) - 1
    # 11/9 of the best is the proven bound; what cannot share a bin is part of the lower bound.
    best = max(math.ceil(lengths.sum() / capacity), int((lengths > capacity / 2).sum()))
    assert len(sums) <= (1.03 if len(lengths) > 200 and capacity > 20 else 11 / 9) * best + 1


def test_an_item_goes_into_the_fullest_bin_that_holds_it():
    offsets, order = best_fit_decreasing([6, 3, 7], 10)
    assert [sorted(bin.tolist()) for bin in np.split(order, offsets[1:-1])] == [[1, 2], [0]]


def test_build_and_describe(tmp_path, tokenizer):
    rows = [*PAIRS, {"prompt": "p", "completion": ""}, {"prompt": "p", "completion": words(90, 0)}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    sources = [
        Source(path=str(tmp_path / "pairs.jsonl"), format="prompt_completion", weight=0.5).model_dump(),
        Source(path=str(tmp_path / "texts.jsonl")).model_dump(),
    ]
    options = {
        "max_seq_length": 128,
        "packing": True,
        "long_examples": "drop",
        "empty_rows": "skip",
        "cache_dir": str(tmp_path / "cache"),
        "preprocessing_num_workers": 1,
        "progress": False,
    }
    pairs, texts = data.build(sources, tokenizer, **options)
    assert (len(pairs.tokens.ends), len(texts.tokens.ends)) == (len(PAIRS) + 1, len(TEXTS))
    count = int(pairs.tokens.ends[-1] + texts.tokens.ends[-1])
    assert data.describe([pairs, texts]) == (
        f"{len(PAIRS) + 1 + len(TEXTS)} documents, {count:,} tokens -> {len(pairs) + len(texts)} sequences; "
        "1 empty rows skipped; 1 over the length"
    )
    loader = data.Loader([pairs, texts], 0, 1, 1, 0, 1, 128, 0)
    assert loader.epoch_sequences == max(1, round(len(pairs) * 0.5)) + len(texts)


# ---- isolation and loss, against Transformers

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MODELS = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gpt2": {"vocab_size": 4096, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "mixtral": SIZES | {"num_local_experts": 4, "router_aux_loss_coef": 0.0},
    "gemma2": SIZES | {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "granite": SIZES | {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": SIZES | {"logit_scale": 0.25},
}


def tiny(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = MODELS[kind] | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    with torch.no_grad():  # so that attention and the head matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


@pytest.fixture
def packed(tokens_of):
    """A batch of one row that holds several examples, and its source."""
    source = sequences(tokens_of(PAIRS[:12], *PAIR), 200, True, "drop")
    batch = collate([(source, source.segments(0))], 200, 0)
    assert batch["document_ids"].max() >= 4
    return batch


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_documents_of_a_pack_do_not_see_each_other(packed, kind):
    model = tiny(kind)
    here = packed["document_ids"][0] == 2
    changed = {name: tensor.clone() for name, tensor in packed.items()}
    changed["input_ids"][0, here] = (changed["input_ids"][0, here] + 1) % 4096

    def difference(**options):
        one, two = (
            model(input_ids=b["input_ids"], **({"position_ids": b["position_ids"]} | options)).logits[0]
            for b in (packed, changed)
        )
        return (one - two).abs()

    apart = difference(use_cache=False)
    assert apart[~here].max() == 0
    assert apart[here].max() > 0
    # The check notices each of the ways in which isolation is lost.
    counting = torch.arange(200)[None]
    ones = torch.ones_like(packed["input_ids"])
    for options in (
        {"use_cache": True},
        {"use_cache": False, "attention_mask": ones},
        {"use_cache": False, "position_ids": counting},
    ):
        assert difference(**options)[~here].max() > 0

    # And so it is for the loss.
    module = CausalLMLoss(model)
    neighbours = [{**b, "labels": b["labels"].masked_fill(here[None], IGNORE)} for b in (packed, changed)]
    assert module(**neighbours[0])[0] == module(**neighbours[1])[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_of_a_pack_is_the_sum_of_its_documents(packed, kind):
    module = CausalLMLoss(tiny(kind))
    total, valid, _ = module(**packed)
    alone = 0.0
    for document in range(1, int(packed["document_ids"].max()) + 1):
        here = packed["document_ids"][0] == document
        loss, _, _ = module(**{name: tensor[:, here] for name, tensor in packed.items()})
        alone += float(loss)
    assert valid == (packed["labels"] >= 0).sum()
    assert float(total) == pytest.approx(alone, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_is_that_of_transformers(tokens_of, kind):
    model = tiny(kind)
    source = sequences(tokens_of(PAIRS[:6], *PAIR), 200, False, "drop")
    total, valid, expected = 0.0, 0, 0.0
    module = CausalLMLoss(model)
    for index in range(len(source)):
        batch = collate([(source, source.segments(index))], None, 0)
        labels = torch.full_like(batch["input_ids"], IGNORE)
        labels[:, 1:] = batch["labels"][:, :-1]  # unshifted, as Transformers takes them
        own = model(input_ids=batch["input_ids"], labels=labels, use_cache=False).loss
        loss, count, _ = module(**batch)
        total, valid, expected = total + float(loss), valid + int(count), expected + float(own) * int(count)
    assert total / valid == pytest.approx(expected / valid, rel=1e-5)


@torch.no_grad()
def test_padding_does_not_change_the_loss(tokens_of):
    module = CausalLMLoss(tiny("llama"))
    source = sequences(tokens_of(PAIRS, *PAIR), 200, False, "drop")
    rows = [(source, source.segments(index)) for index in range(4)]
    together, count, _ = module(**collate(rows, None, 0))
    alone = [module(**collate([row], None, 0)) for row in rows]
    assert float(together) == pytest.approx(sum(float(loss) for loss, *_ in alone), rel=1e-5)
    assert count == sum(int(valid) for _, valid, _ in alone)
    wide, _, _ = module(**collate(rows, 200, 7))
    assert float(wide) == pytest.approx(float(together), rel=1e-5)


# ---- order


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_permute_is_a_bijection(seed):
    for size in [*range(1, 300), 1023, 1024, 1025, 100_000]:
        assert np.array_equal(np.sort(permute(np.arange(size), size, (seed, 3))), np.arange(size))


def test_permute_of_large_sizes():
    size = 10**12 + 7
    positions = np.random.default_rng(0).integers(0, size, 100_000)
    values = permute(positions, size, (5, 1))
    assert values.min() >= 0 and values.max() < size
    assert len(np.unique(values)) == len(np.unique(positions))
    assert abs(np.corrcoef(positions, values)[0, 1]) < 0.02
    assert np.array_equal(permute(positions[::-1], size, (5, 1)), values[::-1])


def test_permutations_differ_by_seed_and_epoch():
    orders = [tuple(permute(np.arange(50), 50, key)) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 1)]]
    assert len(set(orders)) == len(orders)
    fixed = [int((permute(np.arange(50), 50, (0, epoch)) == np.arange(50)).sum()) for epoch in range(200)]
    assert 0.5 < np.mean(fixed) < 2  # a random permutation has one fixed point on average


def test_an_epoch_holds_each_item_once():
    sizes = [5, 17]
    orders, mixtures = [], set()
    for epoch in range(4):
        source, item = draw(np.arange(22) + epoch * 22, sizes, [1.0, 1.0], 7)
        orders.append(list(zip(source.tolist(), item.tolist(), strict=True)))
        mixtures.add(tuple(source.tolist()))
        assert sorted(orders[-1]) == [(0, i) for i in range(5)] + [(1, i) for i in range(17)]
    assert len({tuple(order) for order in orders}) == len(mixtures) == 4


def test_weights_are_passes_per_epoch():
    sizes, weights = [6, 10], [2.0, 0.5]
    assert epoch_shares(sizes, weights) == [12, 5]
    for epoch in range(3):
        source, item = draw(np.arange(17) + epoch * 17, sizes, weights, 7)
        assert np.bincount(item[source == 0]).tolist() == [2] * 6
        assert len(set(item[source == 1].tolist())) == 5
    halves = [frozenset(draw(np.arange(20) + epoch * 20, [40], [0.5], 7)[1].tolist()) for epoch in range(4)]
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(40))
    assert len(set(halves)) == 4
    # Two epochs of a half are one pass over all of it.
    source, item = draw(np.arange(34), sizes, weights, 7)
    assert sorted(item[source == 1].tolist()) == list(range(10))
    source, item = draw(np.arange(34) + 34, sizes, weights, 7)
    assert sorted(item[source == 1].tolist()) == list(range(10))


def numbered(tokens_of, count: int, length: int = 8) -> Sequences:
    return sequences(tokens_of([{"text": f"row {number}"} for number in range(count)]), length, False, "drop")


def steps_of(source, micro, gas, dp, steps, position=0, seed=3) -> list[list[str]]:
    """Return for each step the rows of all ranks, in the order of the global batch."""
    loaders = [Loader([source], seed, micro, gas, rank, dp, None, 0) for rank in range(dp)]
    for loader in loaders:
        loader.load({"position": position})
    found = []
    for _ in range(steps):
        batches = [loader.next_step() for loader in loaders]
        assert all(len(rank) == gas for rank in batches)
        found.append(
            [str(row.tolist()) for g in range(gas) for rank in batches for row in trimmed(rank[g], micro)]
        )
    return found


def trimmed(batch, micro):
    assert len(batch["input_ids"]) == micro
    rows = zip(batch["input_ids"], batch["document_ids"], strict=True)
    return [ids[documents > 0] for ids, documents in rows]


def test_the_global_batch_does_not_depend_on_how_it_is_split(tokens_of):
    source = numbered(tokens_of, 50)
    expected = steps_of(source, 12, 1, 1, 9)
    for micro, gas, dp in [(1, 12, 1), (6, 2, 1), (1, 1, 12), (2, 3, 2), (4, 1, 3), (1, 4, 3)]:
        assert steps_of(source, micro, gas, dp, 9) == expected


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_ranks_are_disjoint_and_complete_and_epochs_reshuffled(tokens_of, dp):
    source = numbered(tokens_of, 48)
    per_epoch = 48 // (4 * dp)
    steps = steps_of(source, 2, 2, dp, 2 * per_epoch)
    first, second = (
        [row for step in steps[e * per_epoch : (e + 1) * per_epoch] for row in step] for e in (0, 1)
    )
    assert len(set(first)) == len(first) == 48
    assert sorted(first) == sorted(second)
    assert first != second
    assert steps_of(source, 2, 2, dp, 2, seed=4) != steps[:2]


def test_a_loader_goes_on_anywhere_without_reading_what_came_before(tokens_of, monkeypatch):
    source = numbered(tokens_of, 31)
    straight = Loader([source], 3, 2, 2, 1, 2, None, 0)
    states, batches = [], []
    for _ in range(20):
        states.append(straight.state())
        batches.append(straight.next_step())
    read = []
    original = Sequences.segments
    monkeypatch.setattr(Sequences, "segments", lambda self, i: read.append(i) or original(self, i))
    for at in (0, 1, 7, 8, 19):
        loader = Loader([source], 3, 2, 2, 1, 2, None, 0)
        loader.load(states[at])
        read.clear()
        again = loader.next_step()
        assert len(read) == 4
        for one, two in zip(again, batches[at], strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_places_name_the_documents_of_the_last_step(tokens_of, tokenizer):
    source = numbered(tokens_of, 10)
    loader = Loader([source], 3, 2, 2, 0, 1, None, 0)
    batches = loader.next_step()
    shown = [tokenizer.decode(row).split("<")[0] for batch in batches for row in batch["input_ids"]]
    assert [int(place.rsplit(":", 1)[1]) for place in loader.places()] == [
        int(t.split()[1]) + 1 for t in shown
    ]


# ---- evaluation


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("micro", [1, 4])
def test_evaluation_covers_each_example_once_in_lock_step(tokens_of, micro, dp):
    source = numbered(tokens_of, 13)
    ranks = [list(eval_batches([source, source], micro, rank, dp, None, 0)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == math.ceil(math.ceil(26 / micro) / dp)
    rows = [
        (str(ids[labels >= 0].tolist()), int((labels >= 0).sum()))
        for batches in ranks
        for batch in batches
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    real = sorted(text for text, valid in rows if valid)
    (expected,) = [list(eval_batches([source], 13, 0, 1, None, 0))]
    once = [
        str(ids[labels >= 0].tolist())
        for ids, labels in zip(expected[0]["input_ids"], expected[0]["labels"], strict=True)
    ]
    assert real == sorted(once * 2)
    assert len(set(real)) == 13
    assert all(batch["input_ids"].shape[0] <= micro for batches in ranks for batch in batches)


# ---- preview


def test_the_preview_marks_what_is_in_the_loss(tokens_of, tokenizer):
    rows = [{"prompt": "What? ", "completion": "\n\nThis one."}, {"prompt": "", "completion": "And this."}]
    source = sequences(tokens_of(rows, *PAIR), 64, True, "drop")
    batch = collate([(source, source.segments(0))], 64, 0)
    shown = preview(tokenizer, batch).splitlines()
    text = "\n".join(shown)
    first, second = text.index("--- document 1"), text.index("--- document 2")
    assert "What? [[\n\nThis one.<|endoftext|>]]" in text[first:second]
    # Nothing comes before the first token to predict it from.
    ids = batch["input_ids"][batch["document_ids"] == 2].tolist()
    assert text[second:].split("\n", 1)[1] == f"{tokenizer.decode(ids[:1])}[[{tokenizer.decode(ids[1:])}]]"
    for document, line in ((1, text[first:]), (2, text[second:])):
        here = batch["document_ids"] == document
        valid = int((batch["labels"][here] >= 0).sum())
        assert line.startswith(f"--- document {document}: {int(here.sum())} tokens, {valid} in the loss")
