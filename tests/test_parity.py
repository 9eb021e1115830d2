"""The parity suite's chosen cases, and faults planted in the code, each of which must make it fail."""

import os
import shutil
import subprocess
import sys

import parity_suite
import pytest
from running import QUICKSTART, REPOSITORY, tiny_recipe

from dstrain import ops, parity

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return parity_suite.suite(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def outcomes(suite):
    chosen = [key for key in suite.cases if key in suite.in_ci]
    return {key: outcome for key, (_, outcome) in zip(chosen, parity_suite.run(suite, chosen), strict=True)}


def test_every_configuration_trains_to_the_same_loss(outcomes):
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    assert not failed, "\n" + parity.table(failed)


def test_gradient_checkpointing_changes_no_bit(outcomes):
    for stage in (1, 2, 3):
        plain = outcomes[f"ZeRO {stage}, fp32, 2"].losses
        assert outcomes[f"ZeRO {stage}, gradient checkpointing, 2"].losses == plain
    assert outcomes["ZeRO 3, activations held on the CPU, 2"].losses == plain
    bf16 = outcomes["ZeRO 3, bf16, 2"].losses
    assert outcomes["zero3_checkpointing_cpu.json, 2"].losses == bf16


@pytest.mark.skipif(not ops.has_libaio(), reason="needs libaio")
def test_nvme_files_were_really_used(suite, outcomes):
    swapped = [file for file in (suite.folder / "nvme").rglob("*.swp") if file.stat().st_size]
    assert {"optimizer", "param"} <= {
        word for file in swapped for word in ("optimizer", "param") if word in str(file)
    }


def test_all_kinds_of_rows_are_run_here(suite):
    groups = {key: group for key, (_, group) in suite.cases.items()}
    assert {groups[key] for key in suite.in_ci} == set(groups.values())
    assert {case.ranks for case, _ in suite.cases.values()} == {1, 2, 4}


def test_every_json_that_a_cpu_can_train_is_in_the_suite(suite):
    covered = {argument for case, _ in suite.cases.values() for argument in case.arguments}
    files = {file.name for file in (REPOSITORY / "ds_configs").glob("*.json")}
    files -= set() if ops.has_libaio() else {"zero3_nvme.json"}
    assert files - covered == {*(f"zero{stage}_fp16.json" for stage in range(4)), "zero3_zeropp.json"}


def test_table_in_the_docs_has_every_case(suite):
    text = (REPOSITORY / "docs" / "parity.md").read_text()
    for case, _ in suite.cases.values():
        assert f"| {case.name} | {case.ranks} |" in text, "run: python tests/parity_suite.py"
    assert "OUT OF TOLERANCE" not in text
    assert "failed" not in text


# What a person could get wrong: (file, what stands there, what the fault makes of it), and the case that must tell.
PACKED = "packed chat: micro 1 x gas 4 x dp 2, ZeRO 1, 2"
MUTATIONS = {
    "none": ([], PACKED),
    "mean of means": (
        [
            (
                "dstrain/step.py",
                "objective = loss_sum * scale",
                'objective = loss_sum / (batch["labels"] >= 0).sum() / len(batches)',
            )
        ],
        PACKED,
    ),
    "clipping per rank": (
        [
            (
                "dstrain/step.py",
                "    norm = _norm_before_step(engine)\n",
                "    norm = _norm_before_step(engine)\n    import deepspeed.comm as comm\n"
                "    everyone = comm.all_reduce\n    comm.all_reduce = lambda *a, **k: None\n",
            ),
            ("dstrain/step.py", "    skipped = not", "    comm.all_reduce = everyone\n    skipped = not"),
        ],
        PACKED,
    ),
    "decay on norms": (
        [("dstrain/model.py", '(keep if name in norms or name.endswith("bias") else decay)', "decay")],
        PACKED,
    ),
    "documents see each other": (
        [
            ("dstrain/model.py", "position_ids=position_ids, use_cache=False", "use_cache=False"),
            ("dstrain/probe.py", "    config = engine.module", "    return\n    config = engine.module"),
        ],
        PACKED,
    ),
    "one rank is fed another's data": (
        [("dstrain/data/loader.py", "[:, self.dp_rank]", "[:, 0]")],
        PACKED,
    ),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_found(suite, tmp_path, fault):
    changes, key = MUTATIONS[fault]
    for name in ("dstrain", "ds_configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copy(REPOSITORY / "train.py", tmp_path)
    for file, before, after in changes:
        text = (tmp_path / file).read_text()
        assert text.count(before) == 1, (file, before)
        (tmp_path / file).write_text(text.replace(before, after))
    worker = tmp_path / "dstrain" / "parity" / "worker.py"
    (outcome,) = parity.compare([suite.cases[key][0]], tmp_path / "runs", worker=worker)
    assert outcome.error is None
    assert outcome.passed == (fault == "none"), parity.table([outcome])


def test_command_compares_a_recipe(tmp_path):
    recipe = tiny_recipe(tmp_path, train={"train_micro_batch_size_per_gpu": 4, "learning_rate": 3e-3})

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "dstrain", "parity", "--config", str(recipe), *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )

    good = command("--stages", "own,3", "--ranks", "1,2", "--steps", "4", "train.gradient_clipping=0.3")
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stderr == ""
    assert good.stdout.count("| ok |") == 4
    assert "| zero_stage 3 | 2 | fp32 |" in good.stdout
    bad = command("--stages", "1", "--ranks", "1", "--steps", "2", "train.learning_rate=1e-12")
    assert bad.returncode == 1
    assert "failed: the weights hardly move: give it a higher learning rate" in bad.stdout
    none = command("--stages", "1", "--ranks", "3")
    assert (none.returncode, none.stderr) == (2, "error: --ranks=3: none divides the global batch of 4\n")
    typo = command("--precisions", "bf61")
    assert (typo.returncode, typo.stderr) == (
        2,
        "error: --precisions=bf61: not one of own, bf16, fp32; did you mean 'bf16'?\n",
    )


def test_command_from_elsewhere_with_experts_twice(tmp_path):
    """A relative path; and two runs of an architecture under ZeRO 3 in one process, code of one's own not asked for."""
    config = parity_suite.MODELS["mixtral"]
    tiny_recipe(tmp_path, model={"config": config, "tokenizer_name_or_path": str(QUICKSTART / "tokenizer")},
                train={"learning_rate": 3e-3})  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "dstrain",
        "parity",
        "--config",
        "recipe.yaml",
        "--stages",
        "3",
        "--ranks",
        "1",
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run([*command, "--steps", "3", "--precisions", "fp32,bf16"], cwd=tmp_path, env=environment,
                             capture_output=True, text=True)  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("| ok |") == 2
