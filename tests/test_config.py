"""Recipes: strict YAML, overrides, paths, names of other tools, and the option count."""

import ast
import json
from pathlib import Path

import pytest
from running import QUICKSTART, REPOSITORY, tiny_recipe

from dstrain import config
from dstrain import recipe as recipe_options
from dstrain.errors import UserError

RECIPES = sorted((REPOSITORY / "recipes").glob("*/recipe.yaml"))


def load(tmp_path, text, *overrides):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return config.load_recipe(file, overrides)


MINIMAL = "output_dir: out\ndeepspeed: zero1.json\nmodel: {model_name_or_path: m}\ndata: {train: a.jsonl}\n"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_shipped_recipes_parse_and_stay_short(recipe):
    text = recipe.read_text()
    config.load_recipe(recipe)
    assert len(text.splitlines()) <= 45
    assert "$schema=../recipe.schema.json" in text.splitlines()[0]
    assert f"deepspeed train.py --config recipes/{recipe.parent.name}/recipe.yaml" in text
    assert len((recipe.parent / "run.sh").read_text().splitlines()) <= 12


def test_schema_file_is_current_and_describes_every_option():
    shipped = json.loads((REPOSITORY / "recipes" / "recipe.schema.json").read_text())
    assert shipped == recipe_options.schema(), (
        "run: python -m dstrain schema --output recipes/recipe.schema.json"
    )

    for model in (
        recipe_options.Recipe,
        recipe_options.Source,
        recipe_options.Model,
        recipe_options.Data,
        recipe_options.Train,
        recipe_options.Eval,
    ):
        assert all(field.description for field in model.model_fields.values())
    assert all(
        field.description
        for m in (recipe_options.Checkpoint, recipe_options.Logging)
        for field in m.model_fields.values()
    )


def test_option_count():
    names = list(recipe_options.option_names())
    assert len(names) == len(set(names)) <= 80


def test_no_option_is_dead():
    """Every option is read somewhere outside of the schema, and a recipe or a documented command uses it."""
    read = set()
    for file in [REPOSITORY / "train.py", *(REPOSITORY / "dstrain").rglob("*.py")]:
        if file.name not in ("config.py", "recipe.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute):
                    read.add(node.attr)
                elif isinstance(node, ast.arg):
                    read.add(node.arg)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value.rsplit(".", 1)[-1])
    documented = "\n".join(
        file.read_text() for file in [*RECIPES, REPOSITORY / "docs" / "options.md", REPOSITORY / "README.md"]
    )
    for name in recipe_options.option_names():
        leaf = name.rsplit(".", 1)[-1]
        assert leaf in read, f"{name} is read nowhere"
        assert leaf in documented, f"{name} is in no recipe and no documented command"


def test_recipe_is_frozen(tmp_path):
    recipe, _ = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.max_steps = 3


BAD = [
    ("train: {learning_rte: 1}", "unknown key 'train.learning_rte'; did you mean 'train.learning_rate'?"),
    ("learning_rate: 1", "unknown key 'learning_rate'; did you mean 'train.learning_rate'?"),
    ("train: {per_device_train_batch_size: 2}", "here it is 'train.train_micro_batch_size_per_gpu'"),
    ("train: {max_grad_norm: 1}", "here it is 'train.gradient_clipping'"),
    ("train: {bf16: true}", "here it is 'train.precision: bf16'"),
    ("train: {learning_rate: fast}", "train.learning_rate='fast': input should be a valid number"),
    ("train: {learning_rate: 0}", "train.learning_rate=0: input should be greater than 0"),
    ("train: {learning_rate: .inf}", "train.learning_rate=inf: input should be a finite number"),
    ("train: {max_steps: 1.5}", "train.max_steps=1.5: input should be a valid integer"),
    (
        "train: {lr_scheduler_type: cos}",
        "train.lr_scheduler_type='cos': input should be 'constant', 'linear'",
    ),
    ("train: {max_steps: 1}\ntrain: {max_steps: 2}", ":6: key 'train' is given twice (first in line 5)"),
    ("train: {max_steps: 1, max_steps: 2}", "key 'max_steps' is given twice"),
    ("train: [", "not valid YAML"),
    ("trian: {}", "unknown key 'trian'"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_recipes_get_one_line(tmp_path, text, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, MINIMAL + text + "\n")
    assert message in str(error.value)
    assert str(tmp_path / "recipe.yaml") in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_parts(tmp_path):
    with pytest.raises(UserError, match="'deepspeed' is missing"):
        load(tmp_path, "output_dir: a\nmodel: {}\ndata: {train: a.jsonl}\n")
    with pytest.raises(UserError, match=r"recipe.ymal: no such recipe; did you mean 'recipe.yaml'\?"):
        load(tmp_path, MINIMAL) and config.load_recipe(tmp_path / "recipe.ymal")
    with pytest.raises(UserError, match="a recipe is a mapping"):
        load(tmp_path, "- a\n")


def test_numbers_in_exponent_notation(tmp_path):
    recipe, _ = load(tmp_path, MINIMAL + "train: {learning_rate: 1e-5, adam_epsilon: 1E-8}\n")
    assert recipe.train.learning_rate == 1e-5
    assert recipe.train.adam_epsilon == 1e-8


def test_overrides(tmp_path):
    recipe, ds = load(
        tmp_path,
        MINIMAL.replace("a.jsonl", "[{path: a.jsonl, weight: 2}, b.jsonl]"),
        "train.max_steps=7",
        "train.learning_rate=3e-4",
        "logging.report_to=[wandb, tensorboard]",
        "data.train.0.weight=0.5",
        "data.train.1.path=c.jsonl",
        "model.config.hidden_size=64",
        "train.gradient_clipping=null",
        "deepspeed.zero_optimization.stage=2",
        "deepspeed=zero3.json",
    )
    assert recipe.train.max_steps == 7
    assert recipe.train.learning_rate == 3e-4
    assert recipe.logging.report_to == ("wandb", "tensorboard")
    assert [source.weight for source in recipe.data.train] == [0.5, 1.0]
    assert [Path(source.path) for source in recipe.data.train] == [
        tmp_path / "a.jsonl",
        Path.cwd() / "c.jsonl",
    ]
    assert recipe.model.config == {"hidden_size": 64}
    assert recipe.train.gradient_clipping is None
    assert ds == {"zero_optimization.stage": 2}
    assert recipe.deepspeed == "zero3.json"
    assert {"train.max_steps", "train.gradient_clipping"} <= config.explicit_keys(recipe)
    assert "train.weight_decay" not in config.explicit_keys(recipe)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps", "'max_steps' is not of the form section.key=value"),
        ("train.max_step=3", "unknown key 'train.max_step'; did you mean 'train.max_steps'?"),
        ("data.train.3.weight=1", "'train' is a list of 1; number its items from 0"),
        ("train.max_steps=[", "command line, train.max_steps"),
    ],
)
def test_bad_overrides(tmp_path, override, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, MINIMAL, override)
    assert message in str(error.value)


def test_paths_follow_the_recipe_and_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "recipe" / "tokenizer").mkdir(parents=True)
    (tmp_path / "recipe" / "data").mkdir()
    (tmp_path / "recipe" / "ds.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    recipe, _ = load(
        tmp_path / "recipe",
        "output_dir: runs/x\ndeepspeed: ds.json\n"
        "model: {model_name_or_path: HuggingFaceTB/SmolLM2-135M, tokenizer_name_or_path: tokenizer}\n"
        "data: {train: [data, missing/*.jsonl, wikitext, org/name], cache_dir: cache}\n",
    )
    assert recipe.output_dir == "runs/x"
    assert recipe.deepspeed == str(tmp_path / "recipe" / "ds.json")
    assert recipe.model.model_name_or_path == "HuggingFaceTB/SmolLM2-135M"
    assert recipe.model.tokenizer_name_or_path == str(tmp_path / "recipe" / "tokenizer")
    paths = [source.path for source in recipe.data.train]
    assert paths[:2] == [str(tmp_path / "recipe" / "data"), str(tmp_path / "recipe" / "missing/*.jsonl")]
    assert paths[2:] == ["wikitext", "org/name"]
    assert recipe.data.cache_dir == str(tmp_path / "recipe" / "cache")


def test_dump_gives_the_same_recipe(tmp_path):
    first, _ = config.load_recipe(
        tiny_recipe(tmp_path), ["train.max_steps=9", "train.gradient_clipping=null"]
    )
    (tmp_path / "again").mkdir()
    second, _ = load(tmp_path / "again", config.dump_recipe(first))
    assert second == first
    assert config.explicit_keys(second) == config.explicit_keys(first)


def test_overrides_may_name_a_folder():
    recipe, _ = config.load_recipe(QUICKSTART)
    assert recipe == config.load_recipe(QUICKSTART / "recipe.yaml")[0]


def test_flat_names_are_the_options(tmp_path):
    recipe, _ = config.load_recipe(tiny_recipe(tmp_path))
    flat = config.flat(recipe)
    options = {name for name in recipe_options.option_names() if not name.startswith("data.train.")}
    assert options | {"data.train", "data.eval"} == set(flat)
    assert json.loads(json.dumps(flat)) == flat
