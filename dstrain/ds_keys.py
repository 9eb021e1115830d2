"""The keys that DeepSpeed 0.19.8 reads from its JSON, and the ones that a training run here must refuse.

Static, so that checking a JSON needs no import of torch or DeepSpeed; a test compares these tables with
DeepSpeed's own classes.
"""

import json
from collections.abc import Iterator
from typing import Any

from dstrain.errors import UserError, nearest

# A value: bool, int (1e9 counts), float, str, list, dict (a block), object (anything) or the valid literals.
Kind = type | tuple[Any, ...]

_DTYPES = ("fp32", "fp16", "bf16")
AUTOCAST_BF16 = ("bf16", "bfloat16", "torch.bfloat16")
AUTOCAST_FP16 = ("fp16", "float16", "half", "torch.float16")


def _keys(kind: type, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


KEYS: dict[str, dict[str, Kind]] = {
    "": {
        **_keys(
            int,
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print "
            "sequence_parallel_size data_parallel_size vocabulary_size",
        ),
        **_keys(float, "gradient_clipping gradient_predivide_factor"),
        **_keys(
            dict,
            "optimizer scheduler zero_optimization bf16 bfloat16 fp16 torch_autocast data_types "
            "activation_checkpointing checkpoint aio flops_profiler comms_logger tensorboard wandb "
            "csv_monitor comet timers compile tensor_parallel expert_parallel hybrid_engine autotuning "
            "data_efficiency pipeline weight_quantization",
        ),
        **_keys(object, "datastates_ckpt"),
        **_keys(str, "gradient_allreduce_op log_level"),
        **_keys(
            bool,
            "prescale_gradients managed_gradient_accumulation zero_allow_untested_optimizer "
            "zero_force_ds_cpu_optimizer use_data_before_expert_parallelism disable_allgather "
            "disable_python_gc dataloader_drop_last dump_state memory_breakdown wall_clock_breakdown",
        ),
        "communication_data_type": _DTYPES,
        "seq_parallel_communication_data_type": _DTYPES,
    },
    "optimizer": {
        **_keys(str, "type"),
        **_keys(dict, "params"),
        **_keys(bool, "legacy_fusion"),
    },
    "scheduler": {
        **_keys(str, "type"),
        **_keys(dict, "params"),
    },
    "zero_optimization": {
        **_keys(
            bool,
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload "
            "cpu_offload_param cpu_offload_use_pin_memory gather_16bit_weights_on_model_save "
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
            "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
            "stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
            "parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights "
            "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint "
            "override_module_apply log_trace_cache_warnings enable_sanity_checks "
            "save_muon_momentum_buffer_in_memory",
        ),
        **_keys(
            int,
            "reduce_bucket_size allgather_bucket_size sub_group_size prefetch_bucket_size "
            "stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold "
            "model_persistence_threshold stage3_model_persistence_threshold max_live_parameters "
            "stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
            "module_granularity_threshold stage3_module_granularity_threshold zero_hpz_partition_size",
        ),
        **_keys(dict, "offload_param offload_optimizer zenflow leaf_module"),
        "stage": (0, 1, 2, 3),
    },
    "zero_optimization.offload_param": {
        **_keys(str, "nvme_path"),
        **_keys(int, "buffer_count buffer_size max_in_cpu"),
        **_keys(bool, "pin_memory"),
        "device": ("none", "cpu", "nvme"),
    },
    "zero_optimization.offload_optimizer": {
        **_keys(str, "nvme_path"),
        **_keys(int, "buffer_count"),
        **_keys(bool, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
        **_keys(float, "ratio cpuadam_cores_perc"),
        "device": ("none", "cpu", "nvme"),
    },
    "zero_optimization.leaf_module": {
        **_keys(object, "classes names name_suffixes"),
    },
    "bf16": {
        **_keys(
            bool,
            "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
            "bf16_optimizer_states",
        ),
    },
    "fp16": {
        **_keys(bool, "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
        **_keys(float, "loss_scale"),
        **_keys(int, "initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    },
    "torch_autocast": {
        **_keys(bool, "enabled"),
        **_keys(list, "lower_precision_safe_modules"),
        "dtype": AUTOCAST_BF16 + AUTOCAST_FP16,
    },
    "data_types": {
        **_keys(list, "keep_in_fp32_modules"),
        "grad_accum_dtype": _DTYPES,
        "param_dtype": _DTYPES,
        "buffer_dtype": _DTYPES,
    },
    "activation_checkpointing": {
        **_keys(
            bool,
            "partition_activations contiguous_memory_optimization cpu_checkpointing profile "
            "synchronize_checkpoint_boundary",
        ),
        **_keys(int, "number_checkpoints"),
    },
    "checkpoint": {
        **_keys(str, "tag_validation"),
        **_keys(bool, "load_universal use_node_local_storage checkpoint_serialization"),
        **_keys(dict, "parallel_write writer"),
    },
    "checkpoint.parallel_write": {
        **_keys(bool, "pipeline_stage"),
    },
    "aio": {
        **_keys(int, "block_size queue_depth intra_op_parallelism"),
        **_keys(bool, "single_submit overlap_events use_gds"),
    },
    "flops_profiler": {
        **_keys(bool, "enabled detailed"),
        **_keys(float, "recompute_fwd_factor"),
        **_keys(int, "profile_step module_depth top_modules"),
        **_keys(str, "output_file"),
    },
    "comms_logger": {
        **_keys(bool, "enabled prof_all verbose debug"),
        **_keys(list, "prof_ops"),
    },
    "tensorboard": {
        **_keys(bool, "enabled"),
        **_keys(str, "output_path job_name"),
    },
    "wandb": {
        **_keys(bool, "enabled"),
        **_keys(str, "group team project"),
    },
    "comet": {
        **_keys(bool, "enabled online"),
        **_keys(int, "samples_log_interval"),
        **_keys(str, "project workspace api_key experiment_name experiment_key mode"),
    },
    "timers": {
        **_keys(dict, "throughput"),
    },
    "timers.throughput": {
        **_keys(bool, "enabled synchronized"),
    },
    "compile": {
        **_keys(
            bool,
            "deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory "
            "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
            "keep_int_input_tensors keep_all_input_tensors",
        ),
        **_keys(int, "free_activation_threshold"),
        **_keys(list, "passes"),
    },
    "tensor_parallel": {
        **_keys(object, "dtype"),
        **_keys(int, "autotp_size"),
        **_keys(
            bool,
            "tp_overlap_comm vocab_parallel_lm_head keep_module_on_host replace_with_kernel_inject "
            "kernel_inject",
        ),
        **_keys(str, "vocab_parallel_ce_backend preset_model"),
        **_keys(dict, "tensor_parallel tp partition_config"),
        **_keys(list, "injection_policy_tuple"),
    },
}
KEYS["csv_monitor"] = KEYS["tensorboard"]
KEYS["bfloat16"] = KEYS["bf16"]

# DeepSpeed gives "auto" a meaning of its own here.
DEEPSPEED_AUTO = {"data_types.keep_in_fp32_modules"}

_MONITOR = "its monitors are not used here; write logging.report_to in the recipe"
_LATER = "not supported yet, only 1"
_AVERAGE = (
    "the gradient here is the mean over all valid tokens of the step, and this key changes how it is averaged"
)
_REMOVED = "DeepSpeed has removed it"

# Keys that DeepSpeed reads or used to, and that would be ignored or wrong here unless at one of these values.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_allreduce_op": (("mean",), _AVERAGE),
    "prescale_gradients": ((False,), _AVERAGE),
    "gradient_predivide_factor": ((1,), _AVERAGE),
    "managed_gradient_accumulation": ((True,), _AVERAGE),
    "tensorboard.enabled": ((False,), _MONITOR),
    "wandb.enabled": ((False,), _MONITOR),
    "csv_monitor.enabled": ((False,), _MONITOR),
    "comet.enabled": ((False,), _MONITOR),
    "data_efficiency.enabled": ((False,), "data comes from the recipe's data section"),
    "autotuning.enabled": ((False,), "it starts training runs of its own and is not supported"),
    "hybrid_engine.enabled": ((False,), "it is for generation in RLHF and is not supported"),
    "pipeline": (
        ({},),
        "DeepSpeed does not read it for this model; pipeline parallelism is not supported yet",
    ),
    "weight_quantization": (({},), "it is for inference"),
    "datastates_ckpt": ((False,), "its checkpoint engine is not supported"),
    "checkpoint.writer": (({},), "checkpoints are written by DeepSpeed's default writer here"),
    "compile.deepcompile": ((False,), "DeepCompile is not supported yet"),
    "compile.autoep_non_moe": ((False,), "AutoEP is not supported yet"),
    "tensor_parallel.autotp_size": ((0, 1), _LATER),
    "sequence_parallel_size": ((1,), _LATER),
    "expert_parallel.enabled": ((False,), "expert parallelism is not supported yet"),
    "use_data_before_expert_parallelism": ((False,), "expert parallelism is not supported yet"),
    "dataloader_drop_last": ((False,), "DeepSpeed's data loader is not used here"),
    "disable_allgather": ((False,), "DeepSpeed reads it and ignores it"),
    "activation_checkpointing.contiguous_memory_optimization": (
        (False,),
        "Transformers' checkpointing has none",
    ),
    "activation_checkpointing.profile": ((False,), "Transformers' checkpointing has none"),
    "activation_checkpointing.synchronize_checkpoint_boundary": (
        (False,),
        "Transformers' checkpointing has none",
    ),
    "zero_optimization.zenflow": (({},), "ZenFlow applies late gradients and is not supported"),
    "zero_optimization.compute_grad_norm": ((True,), "the gradient norm is logged at every step"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed reads it and ignores it; use stage 1"),
    "zero_optimization.elastic_checkpoint": ((False,), "DeepSpeed replaced it by universal checkpoints"),
    "zero_optimization.mics_shard_size": ((-1,), f"{_REMOVED} (MiCS); use zero_hpz_partition_size"),
    "zero_optimization.mics_hierarchical_params_gather": (
        (False,),
        f"{_REMOVED} (MiCS); use zero_hpz_partition_size",
    ),
    "zero_optimization.zeropp_loco_param": (({},), f"{_REMOVED} (LoCo); use zero_quantized_gradients alone"),
    "amp": (({},), f"{_REMOVED} (Apex); use bf16, fp16 or torch_autocast"),
    "nebula": (({},), f"{_REMOVED}; checkpoints are plain folders"),
    "compression_training": (({},), f"{_REMOVED}; the model would train uncompressed"),
    "quantize_training": (({},), f"{_REMOVED}; the model would train unquantized"),
    "eigenvalue": (({},), f"{_REMOVED}, with quantize_training that used it"),
    "sparse_gradients": ((False,), f"{_REMOVED}; gradients of embeddings are reduced dense"),
    "sparse_attention": (({},), f"{_REMOVED}; choose model.attn_implementation in the recipe"),
    "elasticity": (
        ({},),
        f"{_REMOVED}; set train.global_batch_size in the recipe: gas follows the number of devices",
    ),
    "graph_harvesting": ((False,), f"{_REMOVED}"),
    "curriculum_learning": (({},), f"{_REMOVED}; order the sources in the recipe's data section"),
    "progressive_layer_drop": (({},), f"{_REMOVED}"),
}

RENAMED = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "max_grad_norm": "gradient_clipping",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "gradient_checkpointing": "model.gradient_checkpointing of the recipe",
}

# At its only allowed value, none of these does anything: DeepSpeed need not see it.
WITHOUT_EFFECT = {path for path in ONLY if "." not in path} | {
    *("tensorboard", "wandb", "csv_monitor", "comet", "data_efficiency", "autotuning", "hybrid_engine"),
    *("tensor_parallel", "expert_parallel", "data_parallel_size"),
}


def lookup(ds: dict, path: str) -> Any:
    """Return the value at a dotted path, None where it is missing."""
    node: Any = ds
    for part in path.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every value that is not itself a dict, list items included."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from walk(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(node, list):
        for item in node:
            yield from walk(item, prefix)
    else:
        yield prefix, node


def check_keys(ds: dict, file: str) -> None:
    """Check every key and the type of its value; `null` counts as absent.

    Raises:
        UserError: a key that DeepSpeed does not know or no longer has, one that this project cannot honour,
            or a value of the wrong type. The message names the file, the key, the value and the nearest right
            one.
    """
    _check_block(ds, "", file)
    for path, (allowed, reason) in ONLY.items():
        value = lookup(ds, path)
        off = value is None or (isinstance(value, dict) and value.get("enabled") in (False, "auto"))
        if off or value in allowed:
            continue
        remedy = "remove it" if allowed == ({},) else f"remove it or write {_json(allowed[-1])}"
        raise UserError(f"{file}: {path}={_json(value)}: {reason}; {remedy}")


def _check_block(block: dict, prefix: str, file: str) -> None:
    known = KEYS[prefix]
    for key, value in block.items():
        path = f"{prefix}.{key}" if prefix else key
        if path not in ONLY and key not in known:
            raise UserError(f"{file}: unknown key {path!r}{_suggestion(path, key, known)}")
        if value is None or value == "auto" or (path not in KEYS and key not in known):
            continue
        if path == "zero_optimization" and isinstance(
            value, bool
        ):  # DeepSpeed's oldest form, meaning stage 1
            continue
        if path in ("optimizer", "scheduler") and value == "":
            continue
        if not _fits(value, known[key]):
            raise UserError(f"{file}: {path}={_json(value)} is not {_describe(known[key])}")
        if path in KEYS:
            _check_block(value, path, file)
        elif path in RENAMED:
            raise UserError(f"{file}: DeepSpeed reads {path!r} and ignores it; write {RENAMED[path]!r}")


def _suggestion(path: str, key: str, known: dict[str, Kind]) -> str:
    if path in RENAMED:
        return f"; write {RENAMED[path]!r}"
    homes = [home for home, keys in KEYS.items() if key in keys and home]
    return nearest(key, known) or (f"; it belongs in {homes[0]!r}" if homes else "; remove it")


def _fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return value in kind and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0  # inf is not
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return "one of " + ", ".join(_json(literal) for literal in kind)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "a list"}
    return names.get(kind, "a block {...}")


def _json(value: Any) -> str:
    return json.dumps(value)
