"""`python -m dstrain COMMAND`: everything that is not training."""

import json
import math
from pathlib import Path
from typing import Annotated

import click
import typer

from dstrain.errors import UserError

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option(help="File to write instead of the screen")] = None,
) -> None:
    """Write the JSON Schema of a recipe, which lets editors complete and check it."""
    from dstrain.recipe import schema as recipe_schema

    text = json.dumps(recipe_schema(), indent=2) + "\n"
    output.write_text(text, encoding="utf-8") if output else typer.echo(text, nl=False)


@app.command()
def options() -> None:
    """Print every option of a recipe as a Markdown table, and then those of a source."""
    from dstrain.recipe import Recipe, Source, options_table

    for model in (Recipe, Source):
        typer.echo("\n".join(["| key | default | meaning |", "|---|---|---|", *options_table(model)]) + "\n")


@app.command()
def train_tokenizer(
    data: Annotated[str, typer.Option(help="File, glob or folder of documents")],
    output: Annotated[Path, typer.Option(help="Folder to write")],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens, the 256 bytes and the end token among them")
    ] = 4096,
    text_column: Annotated[str, typer.Option(help="Column that holds the text")] = "text",
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    from dstrain.data.sources import find_files, read_rows
    from dstrain.tokenizer import train_tokenizer as train

    files = find_files(data)
    if files is None:
        raise UserError(f"{data}: no such file or folder")

    def texts():  # noqa: ANN202
        for file in files:
            for line, row in read_rows(file):
                if text_column not in row:
                    raise UserError(
                        f"{file}:{line}: no column {text_column!r}; the columns are: {', '.join(row)}"
                    )
                yield row[text_column] or ""

    typer.echo(f"{train(texts(), vocab_size, output):,} tokens -> {output}")


@app.command()
def import_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that ships one")],
    output: Annotated[Path, typer.Option(help="Folder to write")],
) -> None:
    """Turn a GGUF file into a Hugging Face folder that can be trained."""
    from dstrain import distributed
    from dstrain.gguf import find_gguf
    from dstrain.gguf import import_gguf as convert

    distributed.prepare()  # quiets the libraries
    typer.echo(f"{convert(find_gguf(source), output):,} parameters -> {output}")


@app.command(context_settings={"allow_extra_args": True})
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Recipe; section.key=value overrides may follow")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Hosts to check, `host slots=N` a line")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    build_ops: Annotated[bool, typer.Option(help="Build the ops that are not ready, and no more")] = False,
    ranks: Annotated[int | None, typer.Option(help="Ranks to start here; else one a GPU, or 2")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Group of checks to leave out; may be repeated")
    ] = None,
) -> None:
    """Check machine, recipe, hosts and ranks before a run, and say what to mend."""
    import contextlib
    import sys

    from dstrain import doctor as checks

    if build_ops:
        for name, state in checks.build_ops(config, context.args).items():
            typer.echo(f"{name:<20} {state}")
        return
    with contextlib.redirect_stdout(sys.stderr):  # whatever libraries print
        report = checks.examine(config, context.args, hostfile, ranks, skip or ())
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())
    raise SystemExit(report.status)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Output folder of a run")],
    step: Annotated[int | None, typer.Option(help="Checkpoint; else the newest that is whole")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32")] = "bf16",
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB")] = "5GB",
    output: Annotated[Path | None, typer.Option(help="Folder to write; else RUN/export-step-N")] = None,
) -> None:
    """Turn a checkpoint into a Hugging Face folder, a layer at a time."""
    from dstrain import distributed
    from dstrain.convert import convert

    distributed.prepare()  # quiets the libraries
    typer.echo(f"exported to {convert(run, step, dtype, max_shard_size, output)}")


@app.command()
def checkpoints(run: Annotated[Path, typer.Argument(help="Output folder of a run")]) -> None:
    """List a run's checkpoints: step, tokens, loss, size, and whether every byte is as it was written."""
    from dstrain.checkpoint import describe, steps

    root = run / "checkpoints"
    if not steps(root):
        raise UserError(f"{root}: holds no checkpoint")
    typer.echo(f"{'step':>8}  {'tokens':>14}  {'loss':>8}  {'MiB':>9}  state")
    for row in describe(root):
        tokens = f"{row['tokens']:,}" if row["tokens"] is not None else "-"
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else "-"
        size = f"{row['bytes'] / 2**20:.1f}"
        typer.echo(f"{row['step']:>8}  {tokens:>14}  {loss:>8}  {size:>9}  {row['problem'] or 'verified'}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def last_failure(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="The recipe; train.py's other arguments may follow")],
) -> None:
    """Print how the newest run of a recipe failed, if it did: rank, host, step and error."""
    from dstrain import failure
    from dstrain.config import load_recipe, overrides_of

    recipe, _ = load_recipe(config, overrides_of(context.args))
    output_dir = Path(recipe.output_dir).expanduser()
    if failed := failure.read(output_dir):
        typer.echo(failed.text())
    else:
        typer.echo(f"{recipe.output_dir}: no failure of its newest run is on record")


@app.command()
def check_hosts(
    hostfile: Annotated[Path, typer.Option(help="Lines of HOST slots=N")],
    master_addr: Annotated[str, typer.Option("--master_addr", help="Address of the first host")] = "",
    master_port: Annotated[int, typer.Option("--master_port", help="Port of rank 0; 0: a free one")] = 0,
) -> None:
    """Ask each host by ssh: is it reached, has it the same code and versions, is there a way to rank 0?"""
    from dstrain import hosts

    slots = hosts.read_hostfile(hostfile)
    names = [host for host, _ in slots]
    said = hosts.check(names, Path.cwd())
    address, port = hosts.meet(names, said, master_addr, master_port)
    for host, number in slots:
        others = [one for one in said[host]["addresses"] if one != host]
        also = f", other addresses {', '.join(others)}" if others else ""
        typer.echo(f"{hosts.called(host, said)}: {number} rank{'s' * (number > 1)}{also}")
    typer.echo(f"all {len(names)} hosts have the same Python, packages and code; rank 0 at {address}:{port}")


@app.command(context_settings={"allow_extra_args": True})
def parity(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="Recipe to check; section.key=value overrides may follow")],
    stages: Annotated[str, typer.Option(help="ZeRO stages, or `own` for the recipe's JSON")] = "own,0,1,2,3",
    precisions: Annotated[str, typer.Option(help="bf16, fp32, or `own` for the recipe's")] = "own",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks")] = "1,2",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps to compare")] = 10,
) -> None:
    """Compare a recipe's losses under ZeRO stages, precisions and ranks with a plain PyTorch loop."""
    import tempfile

    from dstrain import parity as compared
    from dstrain.parity.plan import cases

    chosen = cases(config, context.args, stages.split(","), precisions.split(","), ranks.split(","), steps)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        outcomes = compared.compare(chosen, Path(folder), seconds_a_case=600)
    typer.echo(compared.table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    typer.echo(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} within tolerance")
    if failed:
        raise SystemExit(1)


@app.command(context_settings={"allow_extra_args": True})
def diagnose(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Output folder of a run")],
    against: Annotated[Path | None, typer.Option(help="Run to compare with, step by step")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Recipe of a run that left none; its overrides may follow")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines")] = False,
) -> None:
    """Say what happened to a run, most likely first, and what to change."""
    from dstrain import diagnose as told

    result = told.diagnose(run, against, told.requested_layout(run, config, context.args))
    typer.echo(json.dumps(result, indent=2) if as_json else told.screen(result))


@app.command()
def unigram(
    config: Annotated[Path, typer.Option(help="Recipe with training and held-out sources")],
) -> None:
    """Print the held-out loss of two models without context: uniform, and training frequencies."""
    import numpy as np

    from dstrain import data, model
    from dstrain.config import load_recipe

    recipe, _ = load_recipe(config)
    if recipe.data.eval is None:
        raise UserError(f"{config}: data.eval is missing; there is nothing held out")
    origin = model.Origin(recipe.model.model_name_or_path)
    tokenizer = model.load_tokenizer(origin, recipe.model.tokenizer_name_or_path, None)
    counts = []
    for sources in (recipe.data.train, recipe.data.eval or ()):
        arranged = data.build(
            [source.model_dump() for source in sources],
            tokenizer,
            max_seq_length=recipe.data.max_seq_length,
            packing=True,
            long_examples="truncate",
            empty_rows=recipe.data.empty_rows,
            cache_dir=recipe.data.cache_dir,
            preprocessing_num_workers=recipe.data.preprocessing_num_workers,
            progress=True,
        )
        counts.append(sum(np.bincount(one.tokens.stream, minlength=len(tokenizer)) for one in arranged))
    smoothed = np.log((counts[0] + 1) / (counts[0].sum() + len(tokenizer)))  # add-one
    typer.echo(f"uniform  {math.log(len(tokenizer)):.4f} nats per token (ln {len(tokenizer):,})")
    typer.echo(f"unigram  {-(smoothed * counts[1]).sum() / counts[1].sum():.4f} nats per held-out token")


def main() -> None:
    """Run a command; a user's mistake is one line and exit status 2."""
    try:
        raise SystemExit(app(standalone_mode=False))
    except click.ClickException as error:
        typer.echo(f"error: {error.format_message()}; see python -m dstrain --help", err=True)
        raise SystemExit(2) from None
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.status) from None


if __name__ == "__main__":
    main()
