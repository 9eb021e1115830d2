"""The order of the data as a pure function of (seed, epoch, position): nothing to store, O(1) to resume."""

import numpy as np

_ROUNDS = 6


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea, Flood 2014): (n,) uint64 -> (n,) uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where a random permutation of range(size) sends each position.

    positions: (n,) integers in [0, size). key: selects the permutation, such as (seed, epoch).
    A Feistel network over the next even power of two, walked on until the value falls inside
    (Black and Rogaway 2002, "cycle walking"; fewer than four rounds of walking on average).
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    low = np.uint64((1 << int(half)) - 1)
    seeds = np.zeros(_ROUNDS, dtype=np.uint64) + np.arange(1, _ROUNDS + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in key:
            seeds = _mix(seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64(part))

        def once(values: np.ndarray) -> np.ndarray:
            left, right = values >> half, values & low
            for seed in seeds:
                left, right = right, left ^ (_mix(right + seed) & low)
            return (left << half) | right

        values = once(positions.astype(np.uint64))
        while (outside := values >= np.uint64(size)).any():
            values[outside] = once(values[outside])
    return values.astype(np.int64)


def draw(
    positions: np.ndarray, sizes: list[int], weights: list[float], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (source, item) for positions in the endless shuffled mixture of several sources.

    positions: (n,) >= 0. An epoch holds round(weight * size) items of each source, shuffled together; over
    the epochs no item of a source is taken again before all the others are.
    """
    shares = epoch_shares(sizes, weights)
    length = sum(shares)
    starts = np.cumsum([0, *shares])
    source = np.zeros(len(positions), dtype=np.int64)
    item = np.zeros(len(positions), dtype=np.int64)
    epochs, offsets = np.divmod(positions.astype(np.int64), length)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        slots = permute(offsets[chosen], length, (seed, int(epoch)))
        source[chosen] = np.searchsorted(starts, slots, side="right") - 1
        item[chosen] = slots - starts[source[chosen]] + epoch * np.array(shares)[source[chosen]]
    for index, size in enumerate(sizes):
        passes, rest = np.divmod(item, size)
        for number in np.unique(passes[source == index]):
            chosen = (source == index) & (passes == number)
            item[chosen] = permute(rest[chosen], size, (seed, index + 1, int(number)))
    return source, item


def epoch_shares(sizes: list[int], weights: list[float]) -> list[int]:
    """Return how many items of each source are in one epoch."""
    return [max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True)]
