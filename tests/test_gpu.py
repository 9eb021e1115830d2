"""What a CPU cannot show."""

import pytest
import torch
from running import REPOSITORY, launch, losses, metrics, tiny_recipe

from dstrain import doctor
from dstrain.diagnose import diagnose
from dstrain.parity.jobs import Job, run_jobs

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


ON_A_GPU = ["zero3_zeropp.json", "zero2_offload.json", "zero3_offload.json", "zero3_checkpointing_cpu.json"]
ON_A_GPU += ["zero1_autocast.json", "zero3_autocast.json", "zero2_bf16_states.json", "zero2_fp32_grads.json"]
ON_A_GPU += ["zero2_overlap.json", "zero3_overlap.json"]


@pytest.mark.parametrize("name", ON_A_GPU)
def test_json_trains_on_a_gpu(tmp_path, name):
    ranks = torch.cuda.device_count() if "zeropp" in name else 1
    more = [f"deepspeed.zero_optimization.zero_hpz_partition_size={ranks}"] if "zeropp" in name else []
    recipe = tiny_recipe(tmp_path, train={"max_steps": 8})
    process = launch(
        *("--config", recipe, "--deepspeed_config", name, *more), launcher="deepspeed", ranks=ranks
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]


def test_fp16_skips_a_step_lowers_its_scale_and_keeps_the_schedule(tmp_path):
    """A first loss scale far too high: steps are skipped until it fits, and each step still has its own rate."""
    recipe = tiny_recipe(tmp_path, train={"max_steps": 12, "lr_scheduler_type": "linear"})
    process = launch(
        *("--config", recipe, "--deepspeed_config", "zero1_fp16.json"),
        *("deepspeed.fp16.initial_scale_power=32", "deepspeed.fp16.hysteresis=1"),
        launcher="deepspeed",
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "fp16 overflow; the loss scale was lowered" in process.stdout
    rates = [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row]
    assert rates == pytest.approx([1e-2 * (1 - step / 11) for step in range(12)], abs=1e-9)
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]


def test_doctor_of_a_gpu(tmp_path):
    devices = torch.cuda.device_count()
    report = doctor.examine(tiny_recipe(tmp_path, deepspeed="zero2.json"), [], None, devices, ["network"])
    assert report.status == 0, report.text()
    seen = {check.name: check.seen for check in report.checks}
    assert f"{devices} of {devices} GPUs in use" in seen["GPU driver"]
    assert "bf16 asked for" in seen["precision"]
    assert "model states alone take" in seen["GPU memory"] or "in use by others" in seen["GPU memory"]
    if devices > 1:
        assert "nccl" in seen["all-reduce latency"]


def test_a_collapsed_loss_scale_is_diagnosed(tmp_path):
    """Gradients that overflow at any scale: steps are skipped, the scale falls to 1, and DeepSpeed gives up."""
    recipe = tiny_recipe(tmp_path, deepspeed="zero1_fp16.json", train={"max_steps": 60})
    arguments = ("overflow", "--config", str(recipe), "deepspeed.fp16.hysteresis=1")
    worker = REPOSITORY / "tests" / "fault_worker.py"
    assert run_jobs([Job(tmp_path, 1, arguments)], tmp_path / "launches", worker=worker) == [None]
    (collapsed, *_) = diagnose(tmp_path / "run")["findings"]
    assert (collapsed["kind"], collapsed["title"]) == ("scale", "the fp16 loss scale collapsed")
    assert any("loss scale 65536 at first" in line for line in collapsed["evidence"])


def test_time_in_collectives_is_read_from_events(tmp_path):
    recipe = tiny_recipe(tmp_path, train={"max_steps": 8}, deepspeed="zero3.json")
    assert launch("--config", recipe, launcher="deepspeed").returncode == 0
    rows = [row for row in metrics(tmp_path / "run") if "collective_s" in row]
    assert len(rows) == 8
    assert all(0 <= row["collective_s"] < row["step_time_s"] for row in rows)
