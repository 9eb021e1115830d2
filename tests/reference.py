"""Train a causal LM the plain way: one process, one document at a time, AdamW, clipping, a schedule.

    python tests/reference.py SPECS.json RESULTS.json

What every DeepSpeed configuration is compared with. It shares no code with what it checks: it needs PyTorch and
Transformers alone, keeps documents apart by never putting two into one forward pass, and takes the mean over
the step's tokens literally.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


def load_model(spec):
    """Load a saved folder, or draw weights from a seed, and add rows to the embedding if there are to be more."""
    dtype = torch.bfloat16 if spec["precision"].startswith("bf16") and not spec["autocast"] else torch.float32
    torch.manual_seed(spec["seed"])
    if spec["folder"] is None:
        config = AutoConfig.for_model(**spec["config"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in fp32
            parameter.data = parameter.data.to(dtype)
        return model
    origin = {"revision": spec["revision"], "trust_remote_code": spec["trust_remote_code"]}
    config = AutoConfig.from_pretrained(spec["folder"], **origin)
    for name, value in spec["config"].items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(
        spec["folder"], config=config, attn_implementation="eager", dtype=dtype, **origin
    )
    had = model.get_input_embeddings().weight.shape[0]
    if spec["rows"] > had:
        model.resize_token_embeddings(spec["rows"], mean_resizing=False)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            weight = module.weight.data
            weight[had:] = weight[:had].float().mean(0)
    return model


def rate(spec, step):
    """Return the learning rate of a step, counted from 0."""
    peak, floor, warmup = spec["lr"], spec["min_lr_ratio"], min(spec["warmup_steps"], spec["max_steps"])
    if step < warmup:
        return peak * (step + 1) / warmup
    last = spec["max_steps"] - 1
    begin = max(warmup - 1, 0)  # the last step at the peak
    if spec["schedule"] == "wsd":
        begin = max(begin, last - max(1, round(spec["decay_ratio"] * spec["max_steps"])))
    if spec["schedule"] == "constant" or step <= begin:
        return peak
    left = 1 - (step - begin) / (last - begin)
    if spec["schedule"] == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return peak * (floor + (1 - floor) * left)


def documents(rows):
    """Yield (tokens, labels) of each document in a batch of rows."""
    for ids, labels, numbers in zip(rows["input_ids"], rows["labels"], rows["document_ids"], strict=True):
        for number in numbers.unique():
            if number > 0:
                yield ids[numbers == number], labels[numbers == number]


def balance(router_logits, experts, chosen):
    """Return the auxiliary loss of Switch Transformers (Fedus et al. 2021, eq. 4) over all layers together."""
    shares = torch.cat(router_logits).float().softmax(-1)
    picked = F.one_hot(shares.topk(chosen, -1).indices, experts).float().mean(0)
    return experts * (picked * shares.mean(0)).sum()


def train(spec, batches):
    """Return one row of loss, auxiliary loss, gradient norm and rate a step."""
    model = load_model(spec).train()
    config, full = model.config, spec["autocast"] or spec["precision"] == "fp32"
    # What AdamW updates: the weights themselves, or fp32 copies of bf16 ones.
    masters = [
        p if full or spec["bf16_states"] else p.detach().float().requires_grad_() for p in model.parameters()
    ]
    decays, others = [], []
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        is_norm_or_bias = name.endswith("bias") or "norm" in name or ".ln_" in name
        (others if is_norm_or_bias else decays).append(master)
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": spec["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=spec["betas"],
        eps=spec["eps"],
    )
    rows = []
    for step in range(spec["steps"]):
        whole = {name: tensor[step] for name, tensor in batches.items()}
        valid = int((whole["labels"] >= 0).sum())
        micro_batches = [
            {n: t[i : i + spec["micro"]] for n, t in whole.items()}
            for i in range(0, len(whole["labels"]), spec["micro"])
        ]
        gradients = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        loss, aux_loss = 0.0, 0.0
        for rows_of_micro in micro_batches:
            router_logits = []
            for ids, labels in documents(rows_of_micro):
                with torch.autocast("cpu", torch.bfloat16, enabled=spec["autocast"]):
                    out = model(input_ids=ids[None], use_cache=False)
                own = F.cross_entropy(out.logits[0].float(), labels, ignore_index=-100, reduction="sum")
                loss += own.item() / valid
                if spec["aux_coef"] is None:
                    (own / valid).backward()
                    collect(model, gradients)
                else:  # the experts' balance is that of the micro batch: its graphs wait for it
                    router_logits.append((own / valid, out.router_logits))
            if router_logits:
                layers = [torch.cat(layer) for layer in zip(*(r for _, r in router_logits), strict=True)]
                aux = balance(layers, spec["experts"], config.num_experts_per_tok)
                aux_loss += aux.item() / len(micro_batches)
                (sum(o for o, _ in router_logits) + spec["aux_coef"] / len(micro_batches) * aux).backward()
                collect(model, gradients)
        norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients))
        shrink = min(1.0, spec["clip"] / (norm + 1e-6)) if spec["clip"] else 1.0
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = (gradient * shrink).to(master.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate(spec, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        rows.append({"loss": loss, "aux_loss": aux_loss, "grad_norm": norm, "lr": rate(spec, step)})
    # How far the first batch's loss has come: the comparison means nothing if the weights hardly move.
    first = {name: tensor[0] for name, tensor in batches.items()}
    valid = int((first["labels"] >= 0).sum())
    with torch.no_grad():
        again = sum(
            F.cross_entropy(
                model(input_ids=ids[None], use_cache=False).logits[0].float(), labels, reduction="sum"
            ).item()
            for ids, labels in documents(first)
        )
    rows[0]["loss_at_the_end"] = again / valid
    return rows


def collect(model, gradients):
    """Add the model's gradients to fp32 sums, and clear them."""
    for parameter, total in zip(model.parameters(), gradients, strict=True):
        if parameter.grad is not None:
            total += parameter.grad.float()
            parameter.grad = None


if __name__ == "__main__":
    disable_progress_bar()
    specs = json.loads(Path(sys.argv[1]).read_text())
    results = [train(spec, load_file(spec["batches"])) for spec in specs]
    Path(sys.argv[2]).write_text(json.dumps(results))
