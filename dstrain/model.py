"""The tokenizer, the Hugging Face model, and the module that DeepSpeed wraps: tokens in, summed loss out."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from dstrain.errors import UserError, nearest
from dstrain.loss import token_loss
from dstrain.probe import is_mixture

# What the engine keeps its weights in; autocast keeps them in fp32.
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Origin:
    """Where weights come from; no name means new ones."""

    name: str | None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def title(self) -> str:
        """The name as a person would type it here."""
        name = self.name or "new"
        return os.path.relpath(name) if Path(name).is_relative_to(Path.cwd()) else name

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` takes."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def load_tokenizer(origin: Origin, name: str | None, chat_template: str | None) -> Any:
    """Load the tokenizer `name`, by default the model's; `chat_template` is a Jinja file in place of its own.

    Raises UserError if there is none.
    """
    name = name or origin.name
    if name is None:
        raise UserError("model.tokenizer_name_or_path is missing: a new model has no tokenizer of its own")
    try:
        own = origin.options if name == origin.name else {"trust_remote_code": origin.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(name, **own)
    except Exception as error:  # OSError, ValueError, and the hub's own kinds
        raise UserError(f"{name}: no tokenizer: {_reason(error)}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{name}: the tokenizer has no tokenizer.json, which data preparation needs")
    if chat_template:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{chat_template}: model.chat_template cannot be read: {error.strerror}"
            ) from None
    return tokenizer


def load_config(origin: Origin, overrides: dict[str, Any], tokenizer: Any) -> PreTrainedConfig:
    """Return the config of saved weights with `overrides`, or a new one of overrides["model_type"].

    A new model gets the ids of the tokenizer's first and end token, with which generation begins and stops.
    """
    if origin.name is None:
        kind = overrides.get("model_type")
        if kind is None:
            raise UserError(
                "model: give model_name_or_path to start from weights, or config with a model_type"
            )
        if kind not in CONFIG_MAPPING:
            raise UserError(f"model.config.model_type={kind!r}: unknown{nearest(str(kind), CONFIG_MAPPING)}")
        config = AutoConfig.for_model(kind)
    else:
        try:
            config = AutoConfig.from_pretrained(origin.name, **origin.options)
        except Exception as error:  # OSError, ValueError, and the hub's own kinds
            raise UserError(f"model.model_name_or_path={origin.name!r}: {_reason(error)}") from None
    known = config.to_dict()
    if overrides.get("output_router_logits"):
        raise UserError("model.config.output_router_logits: the experts' auxiliary loss is not trained here")
    for key in overrides:
        if key not in known:
            raise UserError(f"model.config.{key}: {config.model_type} has no such field{nearest(key, known)}")
    try:
        # Made anew, so that values which follow from others do.
        if origin.name:
            return type(config).from_dict(known | overrides)
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        return type(config)(**(ends | overrides))
    except Exception as error:  # strict configs raise their own kinds for a wrong value
        raise UserError(f"model.config: {_reason(error)}") from None


def check_fit(config: PreTrainedConfig, tokenizer: Any, max_seq_length: int) -> None:
    """Raise UserError if token ids are beyond the embedding, or the sequence beyond the positions."""
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has {len(tokenizer)} tokens but the model's embedding "
            f"only {text.vocab_size} (model.config.vocab_size)"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions and max_seq_length > positions:
        raise UserError(
            f"data.max_seq_length={max_seq_length} is beyond the model's {positions} positions; lower it, "
            "or raise model.config.max_position_embeddings (rotary models: with rope_parameters to match)"
        )


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keep Transformers' table of missing weights off the screen; one line of ours says it."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


@contextmanager
def zero3_init(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """With a ZeRO-3 `ds_config`, let Transformers build its models partitioned from the start."""
    if ds_config is None:
        yield
        return
    import torch._dynamo  # noqa: F401  zero.Init patches torch functions and breaks a first import inside it
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(ds_config)  # Transformers holds it weakly
    yield
    del alive


def build(
    origin: Origin,
    config: PreTrainedConfig,
    attn_implementation: str,
    precision: str,
    seed: int,
    zero3_config: dict[str, Any] | None,
) -> PreTrainedModel:
    """Load weights, or draw new ones from `seed`, the same on every rank and under every ZeRO stage.

    precision: the engine's, such as `bf16` or `bf16 autocast`. zero3_config: the DeepSpeed config if it
    partitions parameters, else None. Raises UserError if weights are missing or cannot be loaded.
    """
    try:
        if origin.name is None:
            # Drawn whole, not inside zero.Init, which would draw other numbers; `initialize` partitions them.
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=attn_implementation, dtype=torch.float32
            )
        with zero3_init(zero3_config), _errors_only():
            model, report = AutoModelForCausalLM.from_pretrained(
                origin.name,
                config=config,
                attn_implementation=attn_implementation,
                dtype=_DTYPES.get(precision, torch.float32),
                output_loading_info=True,
                **origin.options,
            )
    except Exception as error:  # a config can be wrong, and a file damaged, in more ways than have a name
        reason = f"{type(error).__name__}: {_reason(error)}"
        raise UserError(f"model {origin.title} ({config.model_type}) cannot be built: {reason}") from None
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{origin.name}: {len(missing)} weights are not in the checkpoint, first {missing[0]!r}"
        )
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, tied ones once, partitioned ones whole."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def checkpoint_activations(model: PreTrainedModel, offload: bool) -> None:
    """Recompute each layer in the backward pass. offload: hold the layers' inputs in host memory."""
    # On a CPU they are there already, and there is no pinned memory to hold them in.
    model.gradient_checkpointing_enable(offload=offload and torch.accelerator.is_available())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices, which decay, and norms and biases, which do not.

    Tells them apart by name and module and not by shape: a partitioned parameter is flat.
    """
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
    decay, keep = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (keep if name in norms or name.endswith("bias") else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class CausalLMLoss(nn.Module):
    """A causal LM whose forward gives the summed token loss of a batch.

    The model's own forward makes the logits, so its scaling and soft-capping apply, but only of the positions
    that are in the loss: a hook behind the decoder keeps just their hidden states. Under ZeRO-3 the output
    head is gathered as in any forward.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._in_loss: torch.Tensor | None = None
        # Flash attention heeds positions that restart only in a batch of one row.
        self._one_row = str(model.config._attn_implementation).startswith("flash_attention")
        decoder = model.get_decoder()
        (model.base_model if decoder in (None, model) else decoder).register_forward_hook(self._select)

    def _select(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._in_loss is not None:  # (batch, seq, hidden) -> (1, tokens in the loss, hidden)
            output.last_hidden_state = output.last_hidden_state[self._in_loss].unsqueeze(0)
        return output

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summed cross-entropy in nats, number of tokens in it). All arguments (batch, seq).

        Documents are isolated by `position_ids` that restart, which Transformers heeds only without a cache
        and without an attention mask.
        """
        if self._one_row:
            input_ids, labels, position_ids = (x.reshape(1, -1) for x in (input_ids, labels, position_ids))
        in_loss = labels >= 0
        self._in_loss = in_loss
        try:
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        finally:
            self._in_loss = None
        if logits.shape[0] != 1:
            raise UserError(f"model {type(self.model).__name__}: its output head does not follow its decoder")
        return token_loss(logits[0], labels[in_loss]), in_loss.sum()


def flops_per_token(config: PreTrainedConfig, parameters: int, seq_length: int) -> float | None:
    """Return the model's floating-point operations per trained token, forward and backward.

    None where this formula does not hold: experts, of which a token takes a few, and layers without heads.

    6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B): N parameters without the input embedding, L
    layers, H heads of size Q, T tokens of context. Recomputation is not counted.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if is_mixture(config) or not heads:
        return None
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    embedding = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    return 6 * (parameters - embedding) + 12 * text.num_hidden_layers * heads * head * seq_length


def export(model: PreTrainedModel, tokenizer: Any, folder: Path, writer: bool) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer, chat template) from every ZeRO stage.

    All ranks call it; the one with `writer` writes. Partitioned weights are gathered one at a time.
    """
    import deepspeed

    state: dict[str, torch.Tensor] = {}
    tied = set(model.all_tied_weights_keys) if getattr(model, "all_tied_weights_keys", None) else set()
    for name, parameter in model.named_parameters():
        if name in tied:
            continue
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned):
            if writer:
                state[name] = parameter.detach().to("cpu", copy=True)
    if writer:
        saved = model.state_dict().keys()  # buffers that are made anew on loading are not in it
        state |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in saved}
        temporary = folder.with_name(f"{folder.name}.tmp")
        model.save_pretrained(temporary, state_dict=state, safe_serialization=True)
        tokenizer.save_pretrained(temporary)
        _keep_use_cache(temporary / "config.json")
        mode = 0o666 & ~_umask()
        for file in temporary.iterdir():
            file.chmod(mode)  # safetensors are written for the owner alone
        os.replace(temporary, folder) if not folder.exists() else _swap(temporary, folder)


def _keep_use_cache(file: Path) -> None:
    body = json.loads(file.read_text(encoding="utf-8"))
    body["use_cache"] = True  # generation wants it, whatever training set
    file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _swap(new: Path, old: Path) -> None:
    import shutil

    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed just here
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def sample(folder: Path, trust_remote_code: bool, prompt: str, new_tokens: int, seed: int) -> str:
    """Load an exported model as any user would, and return `prompt` with a sampled continuation."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    ids = model.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)
