"""Tokenizing and packing: ours and the way of Transformers' `run_clm.py`, on long and very short documents.

    python benchmarks/data_prep.py [--rounds 3] [--megabytes 60]

The text is that of the quickstart, repeated; a corpus of very short documents has one or two lines of it a
row. Both use the quickstart's tokenizer, two processes and an empty cache. The ratio is that of the wall
times, best of the rounds, since both read the same text. Memory is the most that the process and its
children held together, sampled 20 times a second (shared pages counted once for each process).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import HERE, ROOT, Log, others_s, wait_for_quiet

DOCUMENTS = ROOT / "recipes/quickstart/data/factbook_docs_train.jsonl"
TOKENIZER = ROOT / "recipes/quickstart/tokenizer"
CONTENDERS = {"ours": "dstrain_data.py", "run_clm": "run_clm_data.py"}
GOALS = {"long": 2.0, "short": 1.4}
DISK_GOAL = 0.25


@dataclass(frozen=True)
class Result:
    """What one preparation took."""

    seconds: float
    tokens: int
    disk_mib: float
    memory_mib: float
    others: float  # cores that other processes used meanwhile


def write_long(file: Path, megabytes: int) -> None:
    """Write whole countries, about 27 kB each, until the file has its size."""
    lines = DOCUMENTS.read_text(encoding="utf-8").splitlines(keepends=True)
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < megabytes * 1_000_000:
            stream.writelines(lines)


def write_short(file: Path, rows: int) -> None:
    """Write rows of one or two lines of the same text."""
    texts = [json.loads(line)["text"] for line in DOCUMENTS.read_text(encoding="utf-8").splitlines()]
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    draw = random.Random(42)
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(rows):
            start = draw.randrange(len(lines) - 1)
            text = "\n".join(lines[start : start + draw.choice((1, 2))])
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def prepare(contender: str, file: Path, scratch: Path) -> Result:
    """Run a contender with an empty cache."""
    cache, output = scratch / "cache", scratch / "result.json"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    command = [sys.executable, str(HERE / CONTENDERS[contender]), str(file), str(TOKENIZER)]
    wait_for_quiet()
    started, others = time.perf_counter(), others_s()
    process = subprocess.Popen(
        [*command, str(cache), str(output)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peak))
    watcher.start()
    _, errors = process.communicate()
    watcher.join()
    if process.returncode:
        raise RuntimeError(errors[-4000:])
    others = (others_s() - others) / (time.perf_counter() - started)
    body = json.loads(output.read_text(encoding="utf-8"))
    disk = sum(entry.stat().st_size for entry in cache.rglob("*") if entry.is_file())
    return Result(body["seconds"], body["tokens"], disk / 2**20, peak[0] / 2**20, others)


def _watch(pid: int, peak: list[int]) -> None:
    """Keep the largest resident size of a process and its children, until it ends."""
    try:
        parent = psutil.Process(pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [parent, *parent.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:  # it ended between the two calls
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        return


def main() -> None:
    """Run all rounds, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=60, help="size of the long documents' file")
    parser.add_argument("--rows", type=int, default=500_000, help="very short documents")
    args = parser.parse_args()
    log = Log("data_prep")
    log("Tokenize and pack into sequences of 256: quickstart's text and tokenizer, two processes.")
    log(f"{args.rounds} rounds; a contender counts by its fastest. run_clm's blocks are not isolated.")
    log("")
    results: dict[tuple[str, str], list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        corpora = {"long": scratch / "long.jsonl", "short": scratch / "short.jsonl"}
        write_long(corpora["long"], args.megabytes)
        write_short(corpora["short"], args.rows)
        for number in range(1, args.rounds + 1):
            for corpus, file in corpora.items():
                for contender in CONTENDERS:
                    result = prepare(contender, file, scratch)
                    results.setdefault((corpus, contender), []).append(result)
                    print(f"round {number}  {corpus:5}  {contender:7}  {result.seconds:.1f} s", flush=True)
        sizes = {corpus: file.stat().st_size / 1e6 for corpus, file in corpora.items()}
        write_long(scratch / "longer.jsonl", 4 * args.megabytes)
        longer = prepare("ours", scratch / "longer.jsonl", scratch)

    best = {key: min(rounds, key=lambda result: result.seconds) for key, rounds in results.items()}
    shown = [(f"{corpus}, {sizes[corpus]:.0f} MB", name, result) for (corpus, name), result in best.items()]
    shown.append((f"long x 4, {4 * sizes['long']:.0f} MB", "ours", longer))
    rows = [
        [
            corpus,
            name,
            f"{result.seconds:.1f}",
            f"{result.tokens:,}",
            f"{result.tokens / result.seconds:,.0f}",
        ]
        + [f"{result.disk_mib:.0f}", f"{result.memory_mib:,.0f}"]
        for corpus, name, result in shown
    ]
    log.table(["corpus", "", "seconds", "tokens", "tokens/s", "cache MiB", "peak RSS MiB"], rows)
    log("")
    for corpus, goal in GOALS.items():
        mine, other = best[corpus, "ours"], best[corpus, "run_clm"]
        log.goal(f"{corpus} documents, run_clm's time / ours", other.seconds / mine.seconds, goal)
        disk = mine.disk_mib / other.disk_mib
        log.goal(f"{corpus} documents, our disk / run_clm's", disk, DISK_GOAL, at_most=True)
    grown = longer.memory_mib / best["long", "ours"].memory_mib
    log(f"ours, peak memory of 4 times the text / of the text: {grown:.2f}")
    log("")
    log("All rounds, in order, seconds; in brackets the cores that others used")
    for (corpus, contender), rounds in results.items():
        shown = "  ".join(f"{one.seconds:.1f} ({one.others:.1f})" for one in rounds)
        log(f"  {corpus:5}  {contender:7}  {shown}")
    log("")
    log.machine()


if __name__ == "__main__":
    main()
