"""What W&B is told."""

import struct
import time

import pytest

from dstrain.observe.trackers import Trackers


def records(file):
    """Return the kinds of all records in a W&B file: blocks of 32 KiB as in LevelDB's logs, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, kinds, whole = file.read_bytes(), 7, [], b""
    while place + 7 < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            kinds.append(record.WhichOneof("record_type"))
            whole = b""
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("preempted", [True, False])
def test_a_preempted_run_is_marked(tmp_path, monkeypatch, preempted):
    """W&B then shows `preempting`, not `crashed`, and its agents start the run again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(["wandb"], "project", "run", tmp_path, {"train.max_steps": 2}, None)
    trackers.log({"step": 1, "loss": 2.0})
    if preempted:
        trackers.mark_preempting()
    trackers.finish()
    (file,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 30
    while "exit" not in (kinds := records(file)) and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process writes it
    assert "history" in kinds
    assert ("preempting" in kinds) == preempted
