"""What a CPU cannot show."""

import pytest
import torch
from running import launch, losses, tiny_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_agree_on_a_gpu(tmp_path, stage, precision):
    recipe = tiny_recipe(tmp_path, train={"max_steps": 8})
    process = launch(
        "--config", recipe, "--zero_stage", stage, "--precision", precision, launcher="deepspeed"
    )
    assert process.returncode == 0, process.stderr[-3000:]
    reference = tiny_recipe(tmp_path / "reference", train={"max_steps": 8})
    launch("--config", reference, "--zero_stage", 0, "--precision", "fp32", launcher="deepspeed")
    tolerance = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}[precision]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "reference" / "run"), rel=tolerance)
