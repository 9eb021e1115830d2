"""What the launcher starts to run train.py with faults in it: like dstrain/parity/worker.py, a job after another.

A job's first argument is the fault, the name of a function below. Those that make train.py fail leave what a run
leaves that fails: the watchdog writes it.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

import train  # noqa: E402
from dstrain import distributed, watchdog  # noqa: E402
from dstrain.observe import meter  # noqa: E402
from dstrain.parity import worker  # noqa: E402

# The words of PyTorch 2.13 (c10/cuda/CUDACachingAllocator.cpp), with numbers of an 8B model on a 24 GiB device.
CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.02 GiB "
    "is free. Including non-PyTorch memory, this process has 22.61 GiB memory in use. Of the allocated memory "
    "21.90 GiB is allocated by PyTorch, and 312.40 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)


@contextlib.contextmanager
def patched(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def in_step(action):
    """Do something in each step: action(engine, batches), with engine.global_steps as the steps done."""
    real = train.train_step

    def step(engine, batches, *rest):
        action(engine, batches)
        return real(engine, batches, *rest)

    return patched(train, "train_step", step)


def on_gradients(change):
    """Pass the gradients of the second layer through change(gradient, step)."""
    real, state = train.model.build, {"step": 0}

    def build(*arguments):
        model = real(*arguments)
        for parameter in model.model.layers[1].parameters():
            parameter.register_hook(lambda gradient: change(gradient, state["step"]))
        return model

    @contextlib.contextmanager
    def both():
        with (
            patched(train.model, "build", build),
            in_step(lambda e, b: state.update(step=e.global_steps + 1)),
        ):
            yield

    return both()


def none(world):
    return contextlib.nullcontext()


def slow_loader(world):
    return slowed(train.data.Loader, "next_step", True)


def slow_loader_of_rank_1(world):
    return slowed(train.data.Loader, "next_step", world.rank == 1)


def slow_rank_1(world):
    """In the forward pass, as a slower device would be."""
    return slowed(train.model.CausalLMLoss, "forward", world.rank == 1)


def slowed(owner, name, here):
    """Sleep before a call, by the time since the last one: so the share does not depend on the machine."""
    real, state = getattr(owner, name), {"last": time.perf_counter()}

    def call(self, *arguments, **more):
        if here:
            time.sleep(min(time.perf_counter() - state["last"], 2.0) + 0.05)
        result = real(self, *arguments, **more)
        state["last"] = time.perf_counter()
        return result

    return patched(owner, name, call)


def dead_layer(world):
    return on_gradients(lambda gradient, step: gradient * 0)


def exploding_layer(world):
    return on_gradients(lambda gradient, step: gradient * (1000 if step > 20 else 1))


def infinite_gradient(world):
    return on_gradients(lambda gradient, step: gradient * (float("inf") if step == 15 else 1))


def overflow(world):
    """From the tenth step on, as fp16 sees it."""
    return on_gradients(lambda gradient, step: gradient * (float("inf") if step >= 10 else 1))


def cuda_memory(world):
    def fail(engine, batches):
        if engine.global_steps == 2:
            raise torch.OutOfMemoryError(CUDA_WORDS)

    return in_step(fail)


def cpu_memory(world):
    """No more address space from the fourth step on: a real allocation fails in a batch of many rows."""
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def tighten(engine, batches):
        if engine.global_steps == 3:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, limits[1]))

    @contextlib.contextmanager
    def both():
        try:
            with in_step(tighten):
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    return both()


MEMORY_COMMAND = [
    *("--config", str(Path(__file__).resolve().parents[1] / "recipes" / "quickstart"), "--zero_stage", "2"),
    "train.train_micro_batch_size_per_gpu=64",
]


def memory_at_start(world):
    """While DeepSpeed makes the optimizer's states, before the run has written its recipe."""

    def fail(*arguments, **more):
        raise torch.OutOfMemoryError(CUDA_WORDS)

    @contextlib.contextmanager
    def both():
        sys.argv, before = ["train.py", *MEMORY_COMMAND], sys.argv
        try:
            with patched(train.deepspeed, "initialize", fail):
                yield
        finally:
            sys.argv = before

    return both()


def raises(world):
    def fail(engine, batches):
        if engine.global_steps == 2:
            raise RuntimeError("[Errno 28] No space left on device")

    return in_step(fail)


def stop_file(world):
    real = train.Control.poll

    def poll(self):
        (self.folder / "STOP").touch()
        return real(self)

    return patched(train.Control, "poll", poll)


def known_peak(world):
    return patched(meter, "PEAK_TFLOPS", meter.PEAK_TFLOPS | {"cpu": 1000.0})


def run(file: Path) -> None:
    world = distributed.prepare()
    torch.set_num_threads(1)  # more only wait for one another where models are so small
    for job in json.loads(file.read_text()):
        folder, (name, *arguments) = Path(job["folder"]), job["arguments"]
        error = None
        with (folder / f"log-rank{world.rank}").open("w") as log, worker._into(log):
            try:
                with globals()[name](world):
                    train.main(train.parse_args(arguments), world)
            except Exception as fault:
                traceback.print_exc()
                if world.size > 1 or not (folder / "run" / "logs").exists():
                    error = f"{type(fault).__name__}: {fault}"
                watchdog.fail(fault)  # which writes failure.json
            watchdog.stop()
        if world.is_main or error:
            (folder / "result.json").write_text(json.dumps({"error": error}))
        if error:
            distributed.leave(1)
        worker._forget()
    distributed.leave(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("jobs", type=Path)
    run(parser.parse_args().jobs)
