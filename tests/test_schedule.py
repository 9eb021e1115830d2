"""Schedules as functions: no step without a rate, the peak reached, the minimum at the last step."""

import pytest

from dstrain.schedule import multiplier


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 5, 100])
@pytest.mark.parametrize("warmup", [0, 1, 3, 200])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_shape(kind, steps, warmup, floor):
    at = multiplier(kind, steps, warmup, floor)
    values = [at(done) for done in range(steps)]
    warm = min(warmup, steps)
    assert values[:warm] == pytest.approx([(step + 1) / warm for step in range(warm)])
    assert all(0 < value <= 1 for value in values[:-1])
    peak = max(warm - 1, 0)
    assert values[peak] == 1.0
    assert values[peak:] == sorted(values[peak:], reverse=True)
    if kind == "constant":
        assert set(values[peak:]) == {1.0}
    elif steps - 1 > peak:
        assert values[-1] == pytest.approx(floor, abs=1e-12)
    at(steps)  # DeepSpeed asks for one more after the last step


def test_middle_points():
    assert multiplier("cosine", 101, 0)(50) == pytest.approx(0.5)
    assert multiplier("linear", 101, 0, 0.2)(50) == pytest.approx(0.6)
    wsd = multiplier("wsd", 101, 10, 0.0, decay_ratio=0.2)
    assert [wsd(80), wsd(90), wsd(100)] == pytest.approx([1.0, 0.5, 0.0])
