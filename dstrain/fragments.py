"""What a live engine trains, as pieces of its parameters, whatever ZeRO stage, offload and number of ranks.

DeepSpeed keeps master weights and optimizer states in flat tensors whose layout depends on stage, ranks and
parameter order. A piece is a run of elements of one flattened parameter, and where it lies in such a tensor.
Written down by parameter name and first element, pieces of one layout can be read into any other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """Elements `start` and on of the flattened parameter `name`, held by this rank.

    owner: the tensor that the optimizer updates; the piece lies in it from `offset` on. state: the
    optimizer's for `owner`. replicated: whether every rank holds it.
    """

    name: str
    start: int
    numel: int
    owner: torch.Tensor
    offset: int
    state: dict[str, Any]
    replicated: bool

    def view(self, key: str | None = None) -> torch.Tensor:
        """Return the piece of the master weights, or of the state `key`, as a live 1-D view."""
        whole = self.owner if key is None else self.state[key]
        return whole.data.view(-1).narrow(0, self.offset, self.numel)

    @property
    def moments(self) -> list[str]:
        """Names of the optimizer's states that have an element for each of the weight's."""
        return [key for key, value in self.state.items() if key != "step" and _is_like(value, self.owner)]


def _is_like(value: Any, owner: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == owner.numel() and value.dim() > 0


def subgroups(engine: Any, write: bool) -> Iterator[list[Piece]]:
    """Yield this rank's pieces; those in NVMe files a subgroup at a time, which lies in memory meanwhile.

    write: whether the pieces are changed. Then `refresh` must follow.
    """
    wrapper = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.model.named_parameters()}
    if engine.zero_optimization_stage() == 3:
        yield from _zero3(wrapper, names, write)
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
        yield _mapped(wrapper, wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups, names)
    elif hasattr(wrapper, "fp32_groups_flat_partition"):  # BF16_Optimizer
        yield _mapped(wrapper, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, names)
    elif hasattr(wrapper, "fp32_groups_flat"):  # fp16 and bf16 at ZeRO 0, flattened by group
        yield _flattened(wrapper, names)
    elif hasattr(wrapper, "fp32_groups"):
        pairs = [
            (weight, master)
            for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for weight, master in zip(weights, masters, strict=True)
        ]
        state = wrapper.optimizer.state
        yield [Piece(names[id(w)], 0, m.numel(), m, 0, state[m], True) for w, m in pairs]
    else:  # the optimizer updates the model's own parameters
        optimizer = getattr(wrapper, "optimizer", wrapper)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        yield [Piece(names[id(p)], 0, p.numel(), p, 0, optimizer.state[p], True) for p in parameters]


def _mapped(wrapper: Any, groups: Any, owners: Any, names: Mapping[int, str]) -> list[Piece]:
    """Return the pieces that DeepSpeed has linked to its parameters; one may lie in two ranks' partitions."""
    found = []
    for group, owner in zip(groups, owners, strict=True):
        for parameter in group:
            link = parameter._hp_mapping
            if link is not None:
                here, there = link.lp_fragment_address, link.hp_fragment_address
                state = wrapper.optimizer.state[owner]
                found.append(
                    Piece(names[id(parameter)], here.start, here.numel, owner, there.start, state, False)
                )
    return found


def _flattened(wrapper: Any, names: Mapping[int, str]) -> list[Piece]:
    found = []
    for group, owner in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
        offset = 0
        for parameter in group:
            state = wrapper.optimizer.state[owner]
            found.append(Piece(names[id(parameter)], 0, parameter.numel(), owner, offset, state, True))
            offset += parameter.numel()
    return found


def _zero3(wrapper: Any, names: Mapping[int, str], write: bool) -> Iterator[list[Piece]]:
    for number, group in enumerate(wrapper.fp16_groups):
        swapped = wrapper._swappable_optimizer_subgroup(number)
        if swapped:
            wrapper._optimizer_states_and_gradient_swap_in(number)
        owner, found = wrapper.fp32_partitioned_groups_flat[number], []
        for parameter in group:
            _, offset, length = wrapper.grad_position[wrapper.get_param_id(parameter)]
            start = wrapper._get_param_partition_rank(parameter) * parameter.partition_numel()
            numel = min(length, parameter.ds_numel - start)  # the last rank's part is padded
            if numel > 0:
                state = wrapper.optimizer.state[owner]
                found.append(Piece(names[id(parameter)], start, numel, owner, offset, state, False))
        yield found
        if write:
            wrapper._reassign_or_swap_out_partitioned_parameters(number)
        if swapped and write:
            wrapper._optimizer_states_and_gradient_swap_out(number)
        elif swapped:
            wrapper._release_swap_buffers(number)


@torch.no_grad()
def refresh(engine: Any) -> None:
    """Make the weights of the forward pass anew from master weights that were changed. All ranks call it."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        if wrapper.persistent_parameters:  # small ones, which every rank keeps whole
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    elif hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()
    else:
        for piece in next(subgroups(engine, write=False)):
            parameter = engine.module.model.get_parameter(piece.name)
            if parameter.data_ptr() != piece.owner.data_ptr():
                parameter.view(-1).copy_(piece.view())


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def read_step(engine: Any) -> int:
    """Return how many updates the optimizer has done, as its bias correction counts them."""
    optimizer = optimizer_of(engine)
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    counts += [group["step"] for group in optimizer.param_groups if "step" in group]
    return max((int(count) for count in counts), default=0)


def write_step(engine: Any, state: dict[str, Any], step: int) -> None:
    """Set the number of updates for one owner, as a tensor or a number, whichever its optimizer keeps."""
    optimizer = optimizer_of(engine)
    if type(optimizer).__name__ == "FusedAdam":  # counts for a group
        for group in optimizer.param_groups:
            group["step"] = step
    elif type(optimizer).__module__.startswith("torch."):
        fused = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        device = engine.device if fused else torch.device("cpu")
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)
    else:
        state["step"] = step


def replay(engine: Any, step: int) -> None:
    """Bring DeepSpeed's CPU Adam to where `step` updates would have brought it, to the last bit.

    It keeps the powers of the betas as running products in fp32, and after a jump takes pow() instead, which
    rounds otherwise. So it updates one number `step` times, which takes a few microseconds each.
    """
    optimizer = optimizer_of(engine)
    if type(optimizer).__name__ != "DeepSpeedCPUAdam":
        return
    one = [torch.zeros(1) for _ in range(4)]
    betas = optimizer.param_groups[0]["betas"]
    for count, (beta1, beta2) in [(0, (0.0, 0.0)), *((done, betas) for done in range(step + 1))]:
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, count, 0.0, beta1, beta2, 1e-8, 0.0, False, *one)


_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale(engine: Any) -> dict[str, float]:
    """Return the state of fp16's dynamic loss scale; empty in other precisions."""
    holder = _scaler(engine)
    return {name: getattr(holder, name) for name in _SCALE if hasattr(holder, name)} if holder else {}


def set_loss_scale(engine: Any, state: Mapping[str, float]) -> None:
    """Restore what `loss_scale` returned."""
    holder = _scaler(engine)
    for name, value in state.items():
        if holder and hasattr(holder, name):
            setattr(holder, name, value)


def _scaler(engine: Any) -> Any:
    if not engine.fp16_enabled():
        return None
    return getattr(engine.optimizer, "loss_scaler", engine.optimizer)
