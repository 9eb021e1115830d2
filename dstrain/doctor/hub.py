"""Hub names: in the local cache, on the Hub, or neither. Nothing is downloaded."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIB = 2**30
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class State:
    """Where a Hub name is to be had. words: for a person. problem: why it cannot be had, empty if it can."""

    words: str = ""
    problem: str = ""
    remedy: str = ""
    cached: bool = False


def is_hub_name(name: str) -> bool:
    """Whether a name is one of the Hub's; `load_recipe` makes those of local folders absolute."""
    return not Path(name).is_absolute() and not Path(name).exists()


def is_offline() -> bool:
    """Whether the environment forbids asking the Hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def model(name: str, revision: str | None, files: Sequence[str]) -> State:
    """Find the files of a model; `weights` stands for all its safetensors."""
    missing = [file for file in files if not _in_cache(name, revision, file)]
    if not missing:
        return State(f"{name}: in the Hub cache{', offline' if is_offline() else ''}", cached=True)
    return _ask(name, revision, f"{missing[0]} of {name}", "model")


def dataset(name: str) -> State:
    """Find a dataset: prepared in the cache of `datasets`, or on the Hub."""
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    if folder.is_dir() and any(folder.rglob("*.arrow")):
        return State(f"{name}: in the cache of datasets{', offline' if is_offline() else ''}", cached=True)
    return _ask(name, None, name, "dataset")


def _in_cache(name: str, revision: str | None, file: str) -> bool:
    if file == "weights":
        return _in_cache(name, revision, "model.safetensors") or _has_shards(name, revision)
    return _path(name, revision, file) is not None


def _path(name: str, revision: str | None, file: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, revision=revision)
    return found if isinstance(found, str) else None


def _has_shards(name: str, revision: str | None) -> bool:
    index = _path(name, revision, "model.safetensors.index.json")
    if index is None:
        return False
    shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    return all(_path(name, revision, shard) for shard in shards)


def _ask(name: str, revision: str | None, what: str, kind: str) -> State:
    """Ask the Hub for a repository, with a time-out."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if is_offline():
        remedy = "download it where the Hub can be reached (hf download), or unset HF_HUB_OFFLINE"
        return State(problem=f"{what} is not in the Hub cache, and HF_HUB_OFFLINE is set", remedy=remedy)
    api = HfApi()
    try:
        if kind == "model":
            info: Any = api.model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        else:
            info = api.dataset_info(name, timeout=_TIMEOUT_S)
        if getattr(info, "gated", False):
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        return State(
            problem=f"{name}: gated, and this account has no access",
            remedy="ask for it on its page; hf auth login",
        )
    except RevisionNotFoundError:
        return State(
            problem=f"{name}: no revision {revision!r}",
            remedy="set model.revision to a branch, tag or commit",
        )
    except RepositoryNotFoundError:
        remedy = "look at the spelling; for a private one: hf auth login"
        return State(problem=f"{name}: no such {kind} on the Hub, nor a local folder", remedy=remedy)
    except Exception as error:  # the network's and the client's own kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        remedy = (
            f"download it where the Hub can be reached (hf download {name}), or mend the network or proxy"
        )
        return State(
            problem=f"{what} is not in the Hub cache, and the Hub does not answer: {reason}", remedy=remedy
        )
    if kind == "dataset":
        return State(f"{name}: on the Hub, to be downloaded")
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if not {"tokenizer.json", "config.json"} & set(files):
        return State(problem=f"{name}: the Hub has it without config.json and tokenizer.json")
    size = sum(size for file, size in files.items() if file.endswith(".safetensors"))
    return State(f"{name}: on the Hub, {size / _GIB:.2f} GiB of weights to be downloaded")
