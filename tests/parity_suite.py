"""Every DeepSpeed configuration against a plain PyTorch loop. Run whole, it writes docs/parity.md:

    python tests/parity_suite.py
    python tests/parity_suite.py --only offload

The cases of one launch share it, so most cost about two seconds. test_parity.py runs a chosen part.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from running import QUICKSTART, tiny_recipe  # noqa: E402

from dstrain import ops, parity  # noqa: E402

CHAT = REPOSITORY / "recipes" / "sft-smollm2-135m" / "data" / "factbook_chat_eval.jsonl"
STEPS, GLOBAL_BATCH = 10, 8

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama tied": LLAMA | {"tie_word_embeddings": True},
    "llama untied": LLAMA | {"tie_word_embeddings": False},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 32},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 4096,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 256,
    },
    "mixtral": LLAMA
    | {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    },
}
LARGE = {"llama large": MODELS["llama tied"] | {"hidden_size": 512, "intermediate_size": 1024}}
DATA = {
    "packed": {"max_seq_length": 64},
    "packed chat": {
        "train": [{"path": str(CHAT), "format": "messages"}],
        "max_seq_length": 256,
        "long_examples": "truncate",
    },
}
DATA["padded chat"] = DATA["packed chat"] | {"packing": False}


class Suite:
    """Builds recipes in `folder` and collects cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[str, tuple[parity.Case, str]] = {}  # by name and ranks: the case and its group
        self.in_ci: set[str] = set()
        (folder / "nvme").mkdir(parents=True)

    def recipe(self, model: str, data: str) -> Path:
        """Return a recipe of new weights of MODELS, or of a saved folder."""
        home = self.folder / f"{Path(model).name} {data}".replace(" ", "-")
        if not home.exists():
            new = MODELS | LARGE
            mixture = {"output_router_logits": True} if "mixtral" in model else {}
            weights = (
                {"config": new[model]} if model in new else {"config": mixture, "model_name_or_path": model}
            )
            tiny_recipe(
                home,
                model=weights
                | {
                    "tokenizer_name_or_path": str(QUICKSTART / "tokenizer"),
                    "chat_template": str(REPOSITORY / "docs" / "chatml.jinja"),
                },
                data=DATA[data],
                train={
                    "max_steps": STEPS,
                    "global_batch_size": GLOBAL_BATCH,
                    "learning_rate": 2e-3,
                    "lr_scheduler_type": "cosine",
                    "warmup_steps": 2,
                    "min_lr_ratio": 0.1,
                    "weight_decay": 0.1,
                    "gradient_clipping": 0.5,
                },
                checkpoint={"export": False, "resume_from_checkpoint": "never"},
            )
        return home / "recipe.yaml"

    def add(
        self, group: str, name: str, json: str, ranks: int, *more: str, model="llama tied", data="packed",
        micro=None, ci=False,
    ) -> None:  # fmt: skip
        micro = micro or min(2, GLOBAL_BATCH // ranks)
        arguments = ("--config", str(self.recipe(model, data)), "--deepspeed_config", json)
        arguments += (f"train.train_micro_batch_size_per_gpu={micro}", *more)
        key = f"{name}, {ranks}"
        assert key not in self.cases, key
        self.cases[key] = parity.Case(name, ranks, arguments), group
        if ci:
            self.in_ci.add(key)


def stage_json(stage: int, precision: str) -> tuple[str, ...]:
    """Return the JSON of a stage and precision, and the override that an autocast file needs for the stage."""
    if precision == "autocast":
        return f"zero{3 if stage == 3 else 1}_autocast.json", f"deepspeed.zero_optimization.stage={stage}"
    return (f"zero{stage}.json" if precision == "bf16" else f"zero{stage}_{precision}.json"), ""


def suite(folder: Path) -> Suite:
    """Return all cases that a CPU can train."""
    s = Suite(folder)
    for stage in range(4):
        for precision in ("fp32", "bf16", "autocast"):
            json, more = stage_json(stage, precision)
            for ranks in (1, 2, 4):
                s.add(
                    "stages", f"ZeRO {stage}, {precision}", json, ranks, *filter(None, [more]), ci=ranks == 2
                )
    for data in DATA:
        for micro, ranks in ((8, 1), (2, 1), (2, 2), (1, 2), (1, 4)):
            for stage in (1, 3):
                gas = GLOBAL_BATCH // (micro * ranks)
                name = f"{data}: micro {micro} x gas {gas} x dp {ranks}, ZeRO {stage}"
                s.add("splits", name, f"zero{stage}_fp32.json", ranks, data=data, micro=micro,
                      ci=micro == 1 and ranks == 2)  # fmt: skip
    for stage in (1, 2, 3):
        json = f"zero{stage}_fp32.json"
        on = "model.gradient_checkpointing=true"
        s.add("checkpointing", f"ZeRO {stage}, gradient checkpointing", json, 2, on, ci=True)
        held = "deepspeed.activation_checkpointing.cpu_checkpointing=true"
        s.add("checkpointing", f"ZeRO {stage}, activations held on the CPU", json, 2, held, ci=stage == 3)
    for precision in ("fp32", "bf16"):
        off = [] if precision == "bf16" else ["deepspeed.bf16.enabled=false"]
        for ranks in (1, 2):
            for stage in (1, 2):
                s.add("offload", f"ZeRO {stage}, optimizer on the CPU, {precision}", f"zero{stage}_offload.json",
                      ranks, *off, ci=ranks == 2 and precision == "bf16")  # fmt: skip
            only = "deepspeed.zero_optimization.offload_param.device=none"
            s.add(
                "offload",
                f"ZeRO 3, optimizer on the CPU, {precision}",
                "zero3_offload.json",
                ranks,
                *off,
                only,
            )
            s.add("offload", f"ZeRO 3, optimizer and parameters on the CPU, {precision}", "zero3_offload.json",
                  ranks, *off, ci=ranks == 2)  # fmt: skip
            if ops.has_libaio():  # DeepSpeed swaps tensors of 1 MiB and more, so the model is larger
                block = "deepspeed.zero_optimization.offload"
                here = [f"{block}_{part}.nvme_path={folder / 'nvme'}" for part in ("optimizer", "param")]
                name, buffer = (
                    f"ZeRO 3, both in NVMe files, {precision}",
                    f"{block}_param.buffer_size=3000000",
                )
                s.add("offload", name, "zero3_nvme.json", ranks, *off, *here, buffer, model="llama large",
                      ci=ranks == 2)  # fmt: skip
    for model in MODELS:
        for stage in (0, 1, 2, 3):
            for precision in ("fp32", "bf16"):
                s.add("models", f"{model}, ZeRO {stage}, {precision}", stage_json(stage, precision)[0], 2, model=model,
                      ci=stage in (1, 3) and precision == "fp32")  # fmt: skip
    for json in (
        "zero2_bf16_states",
        "zero3_checkpointing_cpu",
        "zero2_fp32_grads",
        "zero2_overlap",
        "zero3_overlap",
    ):
        for ranks in (1, 2):
            s.add("files", f"{json}.json", f"{json}.json", ranks, ci=ranks == 2)
    for kind, place in save_models(folder).items():
        for stage in range(4):
            for precision in ("fp32", "bf16"):
                json = stage_json(stage, precision)[0]
                s.add("weights", f"saved {kind}, ZeRO {stage}, {precision}", json, 2, model=str(place),
                      ci=precision == "fp32" and kind != "mixtral")  # fmt: skip
                grow = ["model.add_tokens=['<|a|>','<|b|>','<|c|>']", "model.pad_to_multiple_of=64"]
                s.add("weights", f"saved {kind}, 3 tokens added, padded to 64, ZeRO {stage}, {precision}", json, 2,
                      *grow, model=str(place), ci=precision == "bf16" and kind == "llama tied")  # fmt: skip
    return s


def save_models(folder: Path) -> dict[str, Path]:
    """Save weights as people have them: sharded safetensors, tied, untied, and experts one by one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    places = {}
    for kind in ("llama tied", "llama untied", "mixtral"):
        torch.manual_seed(7)
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[kind]))
        places[kind] = folder / "saved" / kind.replace(" ", "-")
        lm.save_pretrained(places[kind], max_shard_size="200KB")
    return places


def run(s: Suite, chosen: list[str]) -> list[tuple[str, parity.Outcome]]:
    """Run the chosen cases and return (group, outcome) of each."""
    cases = [s.cases[key][0] for key in chosen]
    outcomes = parity.compare(cases, s.folder / "runs")
    return [(s.cases[key][1], outcome) for key, outcome in zip(chosen, outcomes, strict=True)]


def main() -> int:
    """Run the suite and write its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose group or name contains this; prints the table"
    )
    parser.add_argument("--ci", action="store_true", help="the cases of test_parity.py; prints the table")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    s = suite(folder)
    chosen = [
        key
        for key, (_, group) in s.cases.items()
        if args.only in f"{group}: {key}" and (key in s.in_ci or not args.ci)
    ]
    started = time.perf_counter()
    results = run(s, chosen)
    lines = []
    for group in dict.fromkeys(group for group, _ in results):
        lines += [f"## {group}", "", parity.table([o for g, o in results if g == group]), ""]
    failed = sum(not outcome.passed for _, outcome in results)
    lines.append(
        f"{len(results) - failed} of {len(results)} within tolerance, {time.perf_counter() - started:.0f} s."
    )
    text = "\n".join(lines)
    print(text)
    if not args.only and not args.ci:
        (REPOSITORY / "docs" / "parity.md").write_text(head() + text + "\n", encoding="utf-8")
    if failed:
        print(f"kept for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return min(failed, 1)


def head() -> str:
    from dstrain import distributed

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY
    )
    limits = parity.TOLERANCES
    return f"""# Parity

Each configuration trains a small model for {STEPS} optimizer steps with the real launcher and train.py. Its losses
and gradient norms are compared, step by step, with a plain single-process PyTorch loop
([tests/reference.py](../tests/reference.py)) that shares no code with it: same initial weights, same batches.
"Off by" is the largest relative difference of any step. Allowed: fp32 losses {limits["fp32"][0]:g} and norms
{limits["fp32"][1]:g}; bf16 and autocast losses {limits["bf16"][0]:g} and norms {limits["bf16"][1]:g}.
Learning rates must be equal, and the first batch's loss must have moved at the end.

Regenerate with `python tests/parity_suite.py`; compare a recipe of your own with `python -m dstrain parity`.
This table: {distributed.versions()}, {distributed.device_name()}, commit {commit.stdout.strip()}.

"""


if __name__ == "__main__":
    raise SystemExit(main())
