"""Random numbers: seeds that differ by rank, and the state of every generator, to be saved and restored."""

import random

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Seed every generator; ranks differ, so that dropout does."""
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of this process's generators: PyTorch's, NumPy's and Python's."""
    _, keys, position, *_ = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), position]),
        "python": torch.tensor(random.getstate()[1]),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    *keys, position = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position))
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
