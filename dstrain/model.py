"""The tokenizer, the Hugging Face model, and the module that DeepSpeed wraps: tokens in, summed loss out."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from dstrain.errors import UserError, nearest
from dstrain.loss import token_loss
from dstrain.probe import is_mixture
from dstrain.weights import Origin, build

__all__ = ["CausalLMLoss", "Origin", "build"]


def load_tokenizer(
    origin: Origin, name: str | None, chat_template: str | None, add_tokens: Sequence[str] = ()
) -> Any:
    """Load the tokenizer `name`, by default the model's.

    chat_template: a Jinja file in place of its own. add_tokens: special tokens that it gets if it lacks them.
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
    tokenizer.add_tokens(list(add_tokens), special_tokens=True)
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


def vocabulary_rows(
    config: PreTrainedConfig, tokenizer: Any, added: Sequence[str], multiple_of: int | None
) -> int:
    """Return the rows that the embedding is to have: the model's, or more where the recipe asks for it.

    added: tokens that the recipe adds. multiple_of: what the rows are rounded up to; with either of them the
    embedding grows to hold the whole tokenizer. Raises UserError if the tokenizer has more tokens than rows.
    """
    rows = config.get_text_config().vocab_size
    if added or multiple_of:
        step = multiple_of or 1
        return -(-max(rows, len(tokenizer)) // step) * step
    if len(tokenizer) > rows:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has {len(tokenizer)} tokens but the model's embedding "
            f"only {rows} (model.config.vocab_size); to add rows, set model.pad_to_multiple_of=64"
        )
    return rows


def check_fit(config: PreTrainedConfig, max_seq_length: int) -> None:
    """Raise UserError if the sequence is beyond the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and max_seq_length > positions:
        raise UserError(
            f"data.max_seq_length={max_seq_length} is beyond the model's {positions} positions; lower it, "
            "or raise model.config.max_position_embeddings (rotary models: with rope_parameters to match)"
        )


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, tied ones once, partitioned ones whole."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def checkpoint_activations(model: PreTrainedModel, offload: bool) -> None:
    """Recompute each layer in the backward pass. offload: hold the layers' inputs in host memory."""
    # On a CPU they are there already, and there is no pinned memory to hold them in.
    model.gradient_checkpointing_enable(offload=offload and torch.accelerator.is_available())


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Give the model's buffers back their values and dtypes after DeepSpeed has cast the whole model.

    Rotary frequencies in bf16 are off by 0.4 %, which at position 4,000 is more than a turn.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.data = before[name].to(buffer.device)


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
    """A causal LM whose forward gives the summed token loss of a batch, and its experts' auxiliary loss.

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
        # Experts are kept in balance if the model's config says so, by its own function and coefficient.
        self.aux_loss_coef: float | None = None
        if getattr(model.config, "output_router_logits", False):
            self._balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
            self.aux_loss_coef = getattr(model, "router_aux_loss_coef", None)
            if self._balance is None or self.aux_loss_coef is None:
                raise UserError(
                    f"model.config.output_router_logits: {model.config.model_type} has no auxiliary loss"
                )

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (summed cross-entropy in nats, tokens in it, auxiliary loss before its coefficient or None).

        All arguments are (batch, seq). The auxiliary loss is that of this batch, without its padding.

        Documents are isolated by `position_ids` that restart, which Transformers heeds only without a cache
        and without an attention mask.
        """
        if self._one_row:
            input_ids, labels, position_ids, document_ids = (
                x.reshape(1, -1) for x in (input_ids, labels, position_ids, document_ids)
            )
        in_loss = labels >= 0
        self._in_loss = in_loss
        try:
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        finally:
            self._in_loss = None
        if output.logits.shape[0] != 1:
            raise UserError(f"model {type(self.model).__name__}: its output head does not follow its decoder")
        aux_loss = None
        if self.aux_loss_coef is not None:
            if not output.router_logits:
                kind = self.model.config.model_type
                raise UserError(f"model.config.output_router_logits: {kind} gives no router logits")
            experts, chosen = self.model.num_experts, self.model.num_experts_per_tok
            aux_loss = self._balance(output.router_logits, experts, chosen, document_ids > 0)
        return token_loss(output.logits[0], labels[in_loss]), in_loss.sum(), aux_loss


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


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
