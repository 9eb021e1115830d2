"""How much memory a rank needs on its device, from the model's shape and how it is split. An estimate.

In bytes, with P parameters, of which T are trained, over D ranks; w, g, m, s bytes of a weight, a gradient, a
master weight (0 where the weights are their own masters) and an optimizer's states:

    weights      P w             / D at ZeRO 3
    gradients    T g             / D at ZeRO 2 and 3
    optimizer    T (m + s)       / D at ZeRO 1 to 3; none on the device under offload
    buckets      reduce_bucket_size w, at ZeRO 1 to 3
    activations  L layers of tokens x (w (5 H + 2 Q + 2 K + 4 I) + 8 H), or with gradient checkpointing
                 tokens x w H a layer, and what one layer takes over the logits, which are gone by then
    logits       tokens x V x (8, and w where it is not 4): the logits, a copy and a softmax of them in fp32

tokens = micro batch x sequence length; H hidden size, Q and K the width of queries and of keys, I the
intermediate size, V the vocabulary. The count per layer is that of a Llama: inputs of norms and products are
kept, a norm works in fp32, a fused attention keeps no matrix of scores. It counts all positions as in the
loss. Not in it: the CUDA context, fragmentation, buffers of kernels and of communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_MOMENTS = 2  # of Adam


@dataclass(frozen=True)
class Layout:
    """A model's shape, and how it is trained."""

    parameters: int
    trainable: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq_length: int
    micro: int
    gas: int
    dp: int
    zero_stage: int
    checkpointing: bool
    offload_optimizer: str  # none, cpu or nvme
    offload_param: str
    reduce_bucket: float
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    state_bytes: int


def layout(facts: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a run from what it recorded when it started; None if something is missing."""
    dtypes = facts.get("dtypes") or {}
    sizes = {name: BYTES.get(dtype.split(" and ")[0], 4) for name, dtype in dtypes.items()}
    weight = sizes.get("parameters")
    if weight is None:
        return None
    master = sizes.get("master_weights", 4)
    values = dict(facts) | {
        "weight_bytes": weight,
        "gradient_bytes": sizes.get("gradients", weight),
        "master_bytes": 0 if weight == master else master,
        "state_bytes": _MOMENTS * sizes.get("optimizer_states", 4),
    }
    names = [field.name for field in fields(Layout)]
    if any(values.get(name) is None for name in names):
        return None
    return Layout(**{name: values[name] for name in names})


def requested(request: Any, parameters: int) -> Layout:
    """Return the layout of a run that recorded none, from a `request.Request` of the same command."""
    config, ds = request.model_config.get_text_config(), request.ds
    zero = ds.config.get("zero_optimization", {})
    heads = getattr(config, "num_attention_heads", None) or 1
    width = BYTES[ds.precision.split()[0]] if "autocast" not in ds.precision else 4
    return Layout(
        parameters=parameters,
        trainable=parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=request.rows,
        seq_length=request.recipe.data.max_seq_length,
        micro=ds.micro,
        gas=ds.gas,
        dp=request.dp_size,
        zero_stage=ds.zero_stage,
        checkpointing=ds.gradient_checkpointing,
        offload_optimizer=zero.get("offload_optimizer", {}).get("device", "none"),
        offload_param=zero.get("offload_param", {}).get("device", "none"),
        reduce_bucket=zero.get("reduce_bucket_size", 5e8),
        weight_bytes=width,
        gradient_bytes=width,
        master_bytes=0 if width == 4 else 4,
        state_bytes=8,
    )


def parts_gib(own: Layout) -> dict[str, float]:
    """Return the estimate for one rank's device, by what the memory is for, in GiB."""
    share = {stage: 1 / own.dp if own.zero_stage >= stage else 1.0 for stage in (1, 2, 3)}
    tokens, width = own.micro * own.seq_length, own.weight_bytes
    inner = 5 * own.hidden + 2 * own.heads * own.head_dim
    inner += 2 * own.kv_heads * own.head_dim + 4 * own.intermediate
    layer = tokens * (width * inner + 8 * own.hidden)
    logits = tokens * own.vocab * (8 + (width if width < 4 else 0))
    kept = layer * own.layers
    if own.checkpointing:
        kept = tokens * width * own.hidden * own.layers + max(layer - logits, 0)
    on_host = own.offload_optimizer != "none"
    weights = own.parameters * width * share[3]
    if own.offload_param != "none":
        weights = own.parameters * width / max(own.layers, 1)  # about a layer is on the device at a time
    parts = {
        "weights": weights,
        "gradients": 0.0
        if on_host and own.zero_stage >= 2
        else own.trainable * own.gradient_bytes * share[2],
        "optimizer": 0.0 if on_host else own.trainable * (own.master_bytes + own.state_bytes) * share[1],
        "buckets": min(own.reduce_bucket, own.trainable) * width if own.zero_stage else 0.0,
        "activations": kept,
        "logits": logits,
    }
    return {name: value / GIB for name, value in parts.items()}


STATES = ("weights", "gradients", "optimizer", "buckets")  # what is there before the first step


def total_gib(own: Layout, starting: bool = False) -> float:
    """Return the estimate for one rank's device, in GiB; starting: before the first step."""
    return sum(gib for name, gib in parts_gib(own).items() if not starting or name in STATES)


@dataclass(frozen=True)
class Change:
    """One thing to change: how, what it costs, and what it saves on the fullest device, in GiB."""

    how: str
    cost: str
    saves_gib: float


def changes(
    own: Layout, needed_gib: float, *, on_cpu: bool, key_for_gas: bool = True, starting: bool = False
) -> list[Change]:
    """Return single changes that save memory, cheapest first. needed_gib: what has to be saved.

    starting: whether it has to be saved before the first step, when there are no activations yet.
    key_for_gas: whether the accumulation has to be named; a recipe with a global batch derives it.
    """
    found = []

    def offer(how: str, cost: str, **new: Any) -> None:
        saved = total_gib(own, starting) - total_gib(replace(own, **new), starting)
        if saved > 0.001:
            found.append(Change(how, cost, saved))

    if own.dp > 1 and own.zero_stage < 2:
        offer("--zero_stage 2", "no more communication than ZeRO 0", zero_stage=2)
    if micro := _micro(own, needed_gib):
        gas = own.gas * own.micro // micro
        how = f"train.train_micro_batch_size_per_gpu={micro}"
        how += f" train.gradient_accumulation_steps={gas}" if key_for_gas else ""
        offer(how, "same losses, smaller kernels", micro=micro, gas=gas)
    if not own.checkpointing:
        how = "model.gradient_checkpointing=true"
        offer(how, "same losses, about a third more compute", checkpointing=True)
    if own.dp > 1 and own.zero_stage < 3:
        offer("--zero_stage 3", "half as much communication again", zero_stage=3)
    if not on_cpu:  # on a CPU the host's memory is the device's
        files = {1: "zero1_offload.json", 2: "zero2_offload.json", 3: "zero3_offload.json"}
        if own.offload_optimizer == "none":
            file = files.get(own.zero_stage, files[2])
            stage = max(own.zero_stage, int(file[4]))
            new = {"offload_optimizer": "cpu", "zero_stage": stage}
            new |= {"offload_param": "cpu"} if stage == 3 else {}
            offer(f"--deepspeed_config {file}", "the optimizer's step runs on the CPU", **new)
        if own.offload_param == "none" and own.zero_stage < 3:
            new = {"offload_optimizer": "cpu", "offload_param": "cpu", "zero_stage": 3}
            offer(f"--deepspeed_config {files[3]}", "weights travel over the bus in each pass", **new)
    if own.zero_stage:
        offer(f"{2 * own.dp} ranks", "twice the devices", dp=2 * own.dp)
    how = f"data.max_seq_length={own.seq_length // 2}"
    offer(how, "another training: documents are cut shorter", seq_length=own.seq_length // 2)
    return found


def _micro(own: Layout, needed_gib: float) -> int | None:
    """Return the largest smaller micro batch that saves what is needed, else 1; None if there is none."""
    smaller = [size for size in range(own.micro - 1, 0, -1) if own.micro * own.gas % size == 0]
    for size in smaller:
        if total_gib(own) - total_gib(replace(own, micro=size)) >= needed_gib:
            return size
    return smaller[-1] if smaller else None
