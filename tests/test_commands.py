"""In this process: bad input gets one line before anything starts, and documented commands dry-run."""

import gc
import json
import re
import shlex
import sys
from types import SimpleNamespace

import datasets
import pytest
import yaml
from running import QUICKSTART, REPOSITORY, tiny_recipe

import train
from dstrain import config, distributed, watchdog
from dstrain.data import sources
from dstrain.errors import UserError


def run(monkeypatch, *arguments, world=distributed.World(0, 1, 0, 1)):
    """Call train.py's main as the command line does."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    gc.collect()  # what an earlier call held, its lock of the output folder among it
    try:
        train.main(train.parse_args(), world)
    finally:
        watchdog.stop()


def written(folder):
    """What lies in an output folder, but for what an attempt leaves that came as far as reading weights."""
    return {path.name for path in folder.iterdir()} - {"logs", ".lock"} if folder.exists() else set()


def rows(path, *lines):
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return str(path)


def chats(path, *conversations):
    return {"path": rows(path, *({"messages": messages} for messages in conversations)), "format": "messages"}


USER = {"role": "user", "content": "Hello"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"

# name, sections of the recipe (functions of the folder), overrides, what the line says
BAD = [
    ("missing data", {"data": lambda p: {"train": str(p / "doc.jsonl")}}, "doc.jsonl: no such file or folder"),
    ("wrong column", {"data": lambda p: {"train": rows(p / "a.jsonl", {"content": "x", "id": 1})}},
     "a.jsonl:1: no column 'text'; the columns are: content, id"),
    ("empty data", {"data": lambda p: {"train": rows(p / "a.jsonl")}}, "a.jsonl: empty data set"),
    ("only empty rows", {"data": lambda p: {"train": rows(p / "a.jsonl", {"text": ""}, {"text": None})}},
     "no row gives a token (2 empty rows)"),
    ("refused empty row", {"data": lambda p: {"train": rows(p / "a.jsonl", {"text": "a"}, {"text": None}), "empty_rows": "error"}},
     "a.jsonl:2: empty row"),
    ("bad JSON", {"data": lambda p: {"train": rows(p / "a.jsonl", {"text": "a"}, b"{'text': 1}\n")}},
     "a.jsonl:2: not valid JSON"),
    ("not UTF-8", {"data": lambda p: {"train": rows(p / "a.jsonl", {"text": "a"}, b'{"text": "\xff"}\n')}},
     "a.jsonl:2: not UTF-8"),
    ("no chat template", {"data": lambda p: {"train": [chats(p / "a.jsonl", [USER])]}}, "has no chat template"),
    ("all labels masked",
     {"data": lambda p: {"train": [chats(p / "a.jsonl", [USER])]},
      "model": lambda p: {"chat_template": rows(p / "t.jinja", TEMPLATE.encode())}},
     "all labels are masked"),
    ("too small an embedding", {"model": lambda p: {"config": small(vocab_size=4000)}},
     "the tokenizer has 4096 tokens but the model's embedding only 4000"),
    ("too long a sequence", {"data": lambda p: {"max_seq_length": 65}}, "data.max_seq_length=65 is beyond the model's 64 positions"),
    ("unknown model type", {"model": lambda p: {"config": small(model_type="lama")}}, "model_type='lama': unknown; did you mean"),
    ("unknown model field", {"model": lambda p: {"config": small(hiden_size=3)}}, "model.config.hiden_size: llama has no such field; did you mean 'hidden_size'?"),
    ("no model", {"model": lambda p: {"config": {}}}, "model: give model_name_or_path"),
    ("no such model", {"model": lambda p: {"model_name_or_path": "./nowhere", "config": {}}}, "nowhere"),
    ("no such tokenizer", {"model": lambda p: {"tokenizer_name_or_path": "./nowhere"}}, "nowhere: no tokenizer"),
    ("batches that conflict",
     {"train": lambda p: {"global_batch_size": 6, "train_micro_batch_size_per_gpu": 4}}, "a global batch of 6 is not a multiple of micro batch 4"),
    ("batches given twice",
     {"train": lambda p: {"global_batch_size": 8, "gradient_accumulation_steps": 2}}, "gradient_accumulation_steps"),
    ("tokens that do not divide", {"train": lambda p: {"global_batch_tokens": 100}}, "global_batch_tokens"),
    ("no such JSON", {"deepspeed": lambda p: "zero9.json"}, "zero9.json: no such file"),
    ("unknown tracker", {"logging": lambda p: {"report_to": ["wandbb"]}}, "unknown tracker; did you mean 'wandb'?"),
    ("missing tracker", {"logging": lambda p: {"report_to": ["comet_ml"]}}, "package is not installed"),
    ("a damaged model", {"model": lambda p: {"config": small(num_key_value_heads=3)}}, "its forward pass fails"),
    ("a held-out weight", {"data": lambda p: {"eval": [{"path": str(p / "held_out.jsonl"), "weight": 2}]}}, "a held-out source has no weight"),
    ("router logits", {"model": lambda p: {"config": small(output_router_logits=True)}}, "output_router_logits"),
    ("a large seed", {"seed": lambda p: 5_000_000_000}, "seed=5000000000"),
    ("no checkpoint there", {"checkpoint": lambda p: {"resume_from_checkpoint": str(p)}}, "holds no checkpoint"),
]  # fmt: skip


def small(**changes):
    base = {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return base | changes


@pytest.mark.parametrize(("sections", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, sections, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = tiny_recipe(tmp_path, **{name: make(tmp_path) for name, make in sections.items()})
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as error:
        run(monkeypatch, "--config", recipe)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not written(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deepspeed.zero_optimization.stage=7"], "stage"),
        (["deepspeed.zero_optimisation.stage=1"], "zero_optimization"),
        (["deepspeed.gradient_clipping=2", "train.gradient_clipping=1"], "gradient_clipping"),
        (["--precision", "fp16"], "fp16"),
        (["--deepspeed_config", "nowhere.json"], "nowhere.json"),
        (["--deepspeed_config", "zero1.json", "--zero_stage", "1"], "--deepspeed_config names a file"),
        (["--zero_stage", "7"], "--zero_stage"),
        (["deepspeed.compile={backend: inductor}"], "compile"),
        (["deepspeed.optimizer={type: Adagrad}"], "Adagrad"),
    ],
)
def test_bad_deepspeed_json_is_one_line(tmp_path, monkeypatch, arguments, message):
    with pytest.raises(UserError) as error:
        run(monkeypatch, "--config", tiny_recipe(tmp_path), *arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_command_lines(tmp_path, monkeypatch, capsys):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(
        UserError, match="'--max_steps' is no option; a recipe's keys are given as section.key=value"
    ):
        run(monkeypatch, "--config", recipe, "--max_steps", "10")
    # Overrides and options in any order, and what the deepspeed launcher puts in.
    run(
        monkeypatch,
        "--local_rank=0",
        "train.max_steps=7",
        "--config",
        recipe,
        "seed=3",
        "--dry-run",
        "train.warmup_steps=2",
    )
    assert "2 warm-up steps" in capsys.readouterr().out


def used(folder, **trainer):
    """An output folder with one checkpoint, as far as starting a run reads it."""
    step = folder / "checkpoints" / "step-2"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"step": 2, **trainer}))
    return folder


def test_never_in_a_used_folder_is_refused(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "run" / "resolved").mkdir(parents=True)
    options = config.flat(config.load_recipe(recipe)[0])
    (tmp_path / "run" / "resolved" / "recipe.json").write_text(json.dumps(options))
    used(tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a different run|holds step-2; choose another output_dir"):
        run(monkeypatch, "--config", recipe, "checkpoint.resume_from_checkpoint=never")


def test_a_damaged_checkpoint_is_named(tmp_path, monkeypatch):
    (used(tmp_path / "old") / "checkpoints" / "step-2" / "manifest.json").write_text('{"step": 2')
    with pytest.raises(UserError, match=r"step-2/manifest.json: damaged .* no other checkpoint is there"):
        run(
            monkeypatch,
            "--config",
            tiny_recipe(tmp_path),
            f"checkpoint.resume_from_checkpoint={tmp_path / 'old'}",
        )


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/x"])
def test_an_output_folder_that_cannot_be(tmp_path, monkeypatch, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir="):
        run(monkeypatch, "--config", tiny_recipe(tmp_path), f"output_dir={tmp_path / where}")


def test_what_is_in_force_may_not_change(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    run(monkeypatch, "--config", recipe, "train.max_steps=1")
    with pytest.raises(UserError, match="in_force.global_batch is 2 there and 4 here"):
        run(monkeypatch, "--config", recipe, "deepspeed.gradient_accumulation_steps=2", "train.max_steps=2")
    # The same global batch in another way is the same run.
    run(
        *(monkeypatch, "--config", recipe, "train.max_steps=2", "train.train_micro_batch_size_per_gpu=1"),
        "train.gradient_accumulation_steps=2",
    )


def test_a_change_is_refused_until_it_is_allowed(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    run(monkeypatch, "--config", recipe, "train.max_steps=1")
    changed = ("train.learning_rate=0.5", "seed=7", "train.max_steps=2")
    diff = "seed is 42 there and 7 here, train.learning_rate is 0.01 there and 0.5 here"
    how = "go on so with --allow-change seed --allow-change train.learning_rate"
    with pytest.raises(UserError, match=f"{diff}; .* {how}"):
        run(monkeypatch, "--config", recipe, *changed)
    run(
        *(monkeypatch, "--config", recipe, *changed),
        "--allow-change=seed",
        "--allow-change=train.learning_rate",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if "lr" in row] == [0.01, 0.5]
    run(
        monkeypatch, "--config", recipe, "seed=7", "train.learning_rate=0.5", "train.max_steps=3"
    )  # taken over


MODELS = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", MODELS)
def test_architectures_train(tmp_path, monkeypatch, kind):
    fields = {"vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields |= {"max_position_embeddings": 64, "intermediate_size": 64, "num_key_value_heads": 2}
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict()
    fields = (
        {key: value for key, value in fields.items() if key in known} | {"model_type": kind} | MODELS[kind]
    )
    packing = kind != "opt"  # which builds its mask without the positions
    recipe = tiny_recipe(
        tmp_path, model={"config": fields}, train={"max_steps": 3}, data={"packing": packing}
    )
    run(monkeypatch, "--config", recipe)
    values = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert values[-1]["eval_loss"] < values[0]["eval_loss"]


@pytest.mark.parametrize(
    ("kind", "attention", "said"),
    [
        ("bert", "eager", "a token sees what comes after it"),
        ("opt", "sdpa", "packed documents see each other"),
        ("mamba", "eager", "packed documents see each other"),
    ],
)
def test_models_that_do_not_keep_documents_apart_are_refused(tmp_path, monkeypatch, kind, attention, said):
    fields = {"model_type": kind, "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 1}
    more = {
        "bert": {"num_attention_heads": 2, "intermediate_size": 64},
        "opt": {"num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32},
    }
    fields |= more.get(kind, {})
    recipe = tiny_recipe(tmp_path, model={"config": fields, "attn_implementation": attention})
    with pytest.raises(UserError, match=said):
        run(monkeypatch, "--config", recipe)
    assert not written(tmp_path / "run")
    if kind != "bert":
        run(monkeypatch, "--config", recipe, "data.packing=false", "train.max_steps=1")


def test_where_the_deepspeed_json_is_looked_for(tmp_path, monkeypatch, capsys):
    recipe = tiny_recipe(tmp_path / "recipe", deepspeed="mine.json")
    (tmp_path / "recipe" / "mine.json").write_text(
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}'
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "typed.json").write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": false}}'
    )
    monkeypatch.chdir(tmp_path / "here")
    for arguments, shown in (
        ((), "ZeRO 2, fp32, mine.json"),
        (("--deepspeed_config", "typed.json"), "ZeRO 1, fp32, typed.json"),
        (("--deepspeed_config", "zero3.json"), "ZeRO 3, bf16, zero3.json"),
        (("deepspeed=typed.json",), "ZeRO 1, fp32, typed.json"),
        (("--zero_stage", "0"), "ZeRO 0, fp32, zero0_fp32.json"),
        (("--precision", "bf16"), "ZeRO 2, bf16, zero2.json"),
        (("deepspeed.zero_optimization.stage=1",), "ZeRO 1, fp32, mine.json"),
    ):
        run(monkeypatch, "--config", recipe, "--dry-run", *arguments)
        assert shown in capsys.readouterr().out


def documented_commands():
    text = (REPOSITORY / "docs" / "options.md").read_text()
    return re.findall(r"(?m)^python (train\.py .*)$", text)


HUB = {
    "Salesforce/wikitext": [{"text": "A text. " * 40}],
    "org/pairs": [{"question": "Where is it?", "answer": " It is here, of course."}],
    "org/chats": [{"conversation": [USER, {"role": "assistant", "content": "Good day."}]}],
}


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_dry_run(tmp_path, monkeypatch, capsys, command):
    asked = []

    def hub(path, subset, split):
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(HUB[path] * 20)

    monkeypatch.setattr(sources, "hub_dataset", hub)
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(REPOSITORY)
    run(
        monkeypatch,
        *shlex.split(command)[1:],
        f"output_dir={tmp_path / 'run'}",
        "model.config.num_hidden_layers=1",
    )
    shown = capsys.readouterr().out
    assert "--- document 1:" in shown
    assert not (tmp_path / "run").exists()
    if "wikitext" in command:
        assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "train[:10%]")]


@pytest.mark.parametrize(
    "recipe", sorted((REPOSITORY / "recipes").glob("*/recipe.yaml")), ids=lambda p: p.parent.name
)
def test_copied_recipes_dry_run_elsewhere(tmp_path, monkeypatch, capsys, recipe, small_chat_model):
    """A copied folder works from another working directory; a Hub model is stood in for by a small one."""
    import shutil

    shutil.copytree(recipe.parent, tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    body = yaml.safe_load(recipe.read_text())
    stand_in = (
        [f"model.model_name_or_path={small_chat_model}"] if "model_name_or_path" in body["model"] else []
    )
    run(monkeypatch, "--config", tmp_path / "copy", "--dry-run", *stand_in)
    assert "--- document 1:" in capsys.readouterr().out
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture
def small_chat_model(tmp_path):
    """A model folder with ChatML tokens and template, as an instruction model has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = (REPOSITORY / "docs" / "chatml.jinja").read_text()
    config = LlamaConfig(**{**small(vocab_size=4098, max_position_embeddings=512), "model_type": "llama"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "chat-model")
    tokenizer.save_pretrained(tmp_path / "chat-model")
    return tmp_path / "chat-model"


def test_schedule_and_batch_of_the_json_are_in_force(tmp_path, monkeypatch, capsys):
    """Literals of the JSON decide where the recipe is silent."""
    ds = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}},
        "bf16": {"enabled": False},
    }
    (tmp_path / "mine.json").write_text(json.dumps(ds))
    recipe = tiny_recipe(tmp_path, deepspeed="mine.json")
    body = yaml.safe_load(recipe.read_text())
    body["train"] = {"max_steps": 4}
    recipe.write_text(yaml.safe_dump(body))
    run(monkeypatch, "--config", recipe, "--dry-run")
    shown = capsys.readouterr().out
    assert "3 micro x 2 gas x 1 dp = 6 sequences" in shown
    assert "cosine, peak lr 0.5, 2 warm-up steps" in shown
    assert "ZeRO 2, fp32, mine.json" in shown


def test_environment_that_contradicts_itself(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK=2 is not below WORLD_SIZE=2"):
        distributed.world()
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(UserError, match="RANK='two' is not a number"):
        distributed.world()


def test_threads_are_shared_among_the_ranks_of_a_machine(monkeypatch):
    import torch

    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for asked, local, expected in (("1", 1, 8), ("1", 2, 4), ("1", 16, 1), ("3", 2, 3), (None, 4, 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked) if asked else monkeypatch.delenv("OMP_NUM_THREADS")
        assert distributed.use_cores(SimpleNamespace(local_size=local)) == expected
    torch.set_num_threads(before)
