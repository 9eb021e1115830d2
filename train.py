"""Train a causal language model with DeepSpeed.

    deepspeed train.py --config recipes/quickstart/recipe.yaml train.max_steps=20
    torchrun --nproc-per-node 2 train.py --config ...      accelerate launch train.py --config ...
    python train.py --config ... --zero_stage 3 --precision fp32 --dry-run

Exit status: 0 done, 2 a mistake to mend, said in one line, 3 a loss or gradient that is not finite, 4 ranks
waited for too long, 5 a rank was killed, 75 a signal: saved, the same command goes on; 1 all else.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from torch.optim.lr_scheduler import LambdaLR

from dstrain import (
    checkpoint,
    data,
    distributed,
    dtypes,
    export,
    model,
    ops,
    request,
    rng,
    run_folder,
    schedule,
    watchdog,
)
from dstrain.control import PREEMPTED, SAVE_FILE, STOP_FILE, Control
from dstrain.distributed import deepspeed
from dstrain.errors import OneLineParser
from dstrain.observe import Observer, check_trackers, preview
from dstrain.probe import check_isolation
from dstrain.step import NonFinite, eval_step, train_step, undo_first_update


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="recipe.yaml, or the folder it is in")
    add("--deepspeed_config", metavar="FILE", help="DeepSpeed JSON instead of the recipe's")
    add("--zero_stage", type=int, choices=[0, 1, 2, 3], help="pick a file of ds_configs/")
    add("--precision", choices=["bf16", "fp16", "fp32"], help="pick a file of ds_configs/")
    add("--dry-run", action="store_true", help="show the first batch; train, write nothing")
    add("--allow-change", action="append", default=[], metavar="KEY", help="may differ from the run so far")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher puts it in
    add("overrides", nargs="*", metavar="section.key=value", help="or deepspeed.KEY=value")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace, world: distributed.World) -> int:
    # ---- 1. What to run. The recipe says what is trained, the DeepSpeed JSON how; its "auto" is filled here.
    asked = (args.deepspeed_config, args.zero_stage, args.precision)
    run = request.load(args.config, args.overrides, *asked, dp_size=world.size, on_cpu=distributed.on_cpu())
    world = distributed.shrink(world, run.dp_size)  # a run that goes on keeps its global batch
    recipe, ds, options = run.recipe, run.ds, run.options
    tokenizer, model_config = run.tokenizer, run.model_config
    check_trackers(recipe.logging.report_to)
    output_dir = Path(recipe.output_dir).expanduser().resolve()
    writes = world.is_main and not args.dry_run
    lock = run_folder.lock(output_dir) if writes and output_dir.is_dir() else None
    run_folder.claim(output_dir, options, args.allow_change)
    resume_from = checkpoint.find(output_dir, recipe.checkpoint.resume_from_checkpoint)

    # ---- 2. Data, before the process group: tokenizing may take longer than ranks wait for one another.
    seq_length, pad_id = recipe.data.max_seq_length, tokenizer.eos_token_id
    model.check_fit(model_config, seq_length)
    how = recipe.data.model_dump(exclude={"train", "eval"}) | {"progress": world.is_main}
    train_data = data.build([source.model_dump() for source in recipe.data.train], tokenizer, **how)
    eval_data = data.build([source.model_dump() for source in recipe.data.eval or ()], tokenizer, **how)
    width = seq_length if recipe.data.packing else None
    loader = data.Loader(train_data, recipe.seed, ds.micro, ds.gas, world.rank, world.size, width, pad_id)
    epoch_steps = loader.epoch_sequences / ds.global_batch
    max_steps = recipe.train.max_steps or math.ceil(recipe.train.num_train_epochs * epoch_steps)
    finished = (checkpoint.newest_step(resume_from) or 0) >= max_steps
    exported = (output_dir / "hf_model").exists() or not recipe.checkpoint.export
    if finished and exported and not args.dry_run:
        distributed.say(world, f"{output_dir}: finished at step {max_steps}; raise train.max_steps to go on")
        return 0

    # ---- 3. Ranks, model and engine.
    swap_locks = run_folder.lock_nvme(ds.nvme_paths, world)  # noqa: F841  held as long as the process lives
    lock = lock or (run_folder.lock(output_dir) if writes else None)
    ops.ready((*ops.COLLECTIVES, *ds.ops) if distributed.on_cpu() else ds.ops)
    distributed.start(world, recipe.train.init_timeout_seconds)
    limits = (recipe.train.init_timeout_seconds, recipe.train.train_timeout_seconds)
    watchdog.start(world, None if args.dry_run else output_dir, *limits)
    attention, zero3_config = recipe.model.attn_implementation, ds.config if ds.zero_stage == 3 else None
    lm = model.build(run.origin, model_config, attention, ds.precision, recipe.seed, run.rows, zero3_config)
    if ds.gradient_checkpointing:
        model.checkpoint_activations(lm, offload=ds.offload_activations)
    warmup_steps = ds.warmup_steps or round(ds.warmup_ratio * max_steps)
    shape = (ds.lr_scheduler_type, max_steps, warmup_steps, ds.min_lr_ratio, recipe.train.decay_ratio)
    rng.seed_all(recipe.seed, world.rank)
    with model.keep_buffers(lm):
        engine, *_ = deepspeed.initialize(
            model=model.CausalLMLoss(lm),
            model_parameters=model.parameter_groups(lm, ds.weight_decay),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, schedule.multiplier(*shape)),
            config=ds.config,
        )
    undo_first_update(engine)
    check_isolation(engine, recipe.data.packing)
    first, tokens_seen, wandb_id, began = 0, 0, None, time.perf_counter()
    if resume_from and not args.dry_run:
        state = checkpoint.load(engine, checkpoint.newest_good(resume_from, world), world)
        first, tokens_seen, wandb_id = state["step"], state["tokens_seen"], state["wandb_id"]
        began -= state["wall_s"]
        loader.load(state["loader"])

    # ---- 4. The loop.
    logs, parameters = recipe.logging, model.count_parameters(lm)
    flops = model.flops_per_token(model_config, parameters, seq_length)
    observer = Observer(output_dir, world, max_steps, first, logs.logging_steps, flops)
    held = dtypes.held(engine)
    observer.header(
        (*ds.notes, *dtypes.notes(held, ds.gas)),
        held,
        **run.describe(parameters, max_steps, epoch_steps, warmup_steps),
        data=data.describe(train_data),
        eval=data.describe(eval_data) if eval_data else "none",
        device=distributed.describe(world),
        versions=distributed.versions(),
        output=f"{recipe.output_dir}" + (f", resumed from step {first:,}" if first else ""),
    )
    if args.dry_run:
        observer.say(preview(tokenizer, loader.next_step()[0]))
        return 0
    if world.is_main:
        run.keep(output_dir)
    observer.start(engine, loader, logs.report_to, logs.project, logs.run_name, options, wandb_id)
    how = recipe.checkpoint.model_dump(include={"save_total_limit", "async_save", "save_optimizer"})
    saver = checkpoint.Saver(output_dir, world, **how)

    def evaluate(step: int = 0) -> float:
        watchdog.enter("evaluation", step)
        micro = recipe.eval.eval_micro_batch_size_per_gpu or ds.micro
        return eval_step(engine, data.eval_batches(eval_data, micro, world.rank, world.size, width, pad_id))

    def save(step: int, position: dict[str, int], loss: float | None = None) -> None:
        watchdog.enter("saving", step)
        wall_s = time.perf_counter() - began
        state = {"tokens_seen": tokens_seen, "loader": position, "loss": loss, "wall_s": wall_s}
        saver.save(engine, step, state | {"wandb_id": observer.wandb_id})
        observer.measured(saver.measured)

    control = Control(output_dir, world.is_main)
    if eval_data and first == 0:
        observer.evaluated(evaluate())
    for step in range(first + 1, max_steps + 1):
        watchdog.enter("step", step)
        started, position = time.perf_counter(), loader.state()
        batches = loader.next_step()
        waited_s = time.perf_counter() - started
        try:
            result = train_step(engine, batches, control.poll())  # forward to optimizer and schedule
        except NonFinite as fault:
            if not fault.applied:
                save(step - 1, position)  # the weights are still those of the step before
                saver.wait()
            fault.tell(step, distributed.gather(loader.places()))
            raise
        tokens_seen += result.tokens
        watchdog.enter("report", step)
        observer.step(step, result, step / epoch_steps, tokens_seen, time.perf_counter() - started, waited_s)
        eval_due = eval_data and schedule.is_due(step, recipe.eval.eval_steps, max_steps)
        observer.report(evaluate(step) if eval_due else None)
        preempted, stopped, save_now = result.asked
        if schedule.is_due(step, recipe.checkpoint.save_steps, max_steps) or any(result.asked):
            save(step, loader.state(), result.loss)
        control.done(*[SAVE_FILE] * save_now, *[STOP_FILE] * stopped)
        if (preempted or stopped) and step < max_steps:
            saver.wait()
            observer.interrupted(step, preempted, time.perf_counter() - began, saver.measured)
            return PREEMPTED if preempted else 0
    saver.wait()
    observer.finish(time.perf_counter() - began, saver.measured)

    if recipe.checkpoint.export:
        watchdog.enter("export", max_steps)
        folder = output_dir / "hf_model"
        export.export(engine, tokenizer, folder, writer=world.is_main)
        observer.say(f"exported to {recipe.output_dir}/hf_model")
        if logs.sample_prompt and world.is_main:
            how = (run.origin.trust_remote_code, logs.sample_prompt, logs.sample_tokens, recipe.seed)
            observer.say(f"sample of hf_model, from {logs.sample_prompt!r}:\n" + export.sample(folder, *how))
    return 0


if __name__ == "__main__":
    try:
        status = main(parse_args(), distributed.prepare())
        watchdog.finish()
    except (Exception, KeyboardInterrupt) as error:  # told once for all ranks, with rank and host
        status = watchdog.fail(error)
    distributed.leave(status)
