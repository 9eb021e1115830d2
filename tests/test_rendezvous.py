"""Ranks meet before their process group: all of them, in time, with the same code; or one line says who is not."""

import json
import socket
import threading
from datetime import timedelta

import pytest
import torch
from running import REPOSITORY, launch, tiny_recipe

from dstrain import failure, rendezvous
from dstrain.errors import UserError
from dstrain.fingerprint import differences, fingerprint


@pytest.fixture
def store():
    """A store of this process, at a port that is free."""
    return torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def together(store, size, ranks=None, limit_s=5.0, change=None):
    """Let ranks meet, each in a thread with a connection of its own. Returns what each got, or raised."""
    outcomes = {}

    def join(rank):
        own = torch.distributed.TCPStore(
            "127.0.0.1", store.port, None, False, timeout=timedelta(seconds=20), wait_for_workers=False
        )
        try:
            outcomes[rank] = rendezvous.meet(own, rank, size, limit_s)
        except UserError as error:
            outcomes[rank] = str(error)

    threads = [
        threading.Thread(target=join, args=(rank,)) for rank in (range(size) if ranks is None else ranks)
    ]
    for thread in threads:
        thread.start()
    if change:
        change(store)
    for thread in threads:
        thread.join()
    return outcomes


def test_ranks_that_meet_know_one_another(store):
    met = together(store, 4)
    assert len({meeting.name for meeting in met.values()}) == 1
    assert all(len(meeting.ranks) == 4 for meeting in met.values())
    assert met[2].ranks[0]["host"] == socket.gethostname()


def test_what_earlier_ranks_wrote_is_no_rank(store):
    """A launcher that starts ranks again keeps its store: only who answers is there."""
    first = together(store, 3)
    second = together(store, 3)
    assert second[0].name != first[0].name
    assert [rank["token"] for rank in second[1].ranks] != [rank["token"] for rank in first[1].ranks]
    alone = together(store, 3, ranks=(0, 2), limit_s=1.0)
    assert alone[0] == alone[2]
    assert alone[0].startswith("rank 1 of 3 did not come within 1 s; there are ranks 0, 2 on ")


def test_a_first_rank_that_does_not_come(store):
    outcomes = together(store, 2, ranks=(1,), limit_s=-9.5)
    assert "the first rank does not answer within" in outcomes[1]


def test_a_host_with_other_packages(store, monkeypatch):
    """One line on every rank, which names the host and what differs."""

    def other():
        facts = fingerprint()
        if threading.current_thread().name == "other":
            facts |= {"torch": "1.0", "code": "abc"}
        return facts

    started = threading.Thread.start
    count = iter(range(10))

    def start(thread):
        if next(count) == 1:
            thread.name = "other"
        started(thread)

    monkeypatch.setattr(rendezvous, "fingerprint", other)
    monkeypatch.setattr(threading.Thread, "start", start)
    outcomes = together(store, 3)
    assert set(outcomes) == {0, 1, 2}
    assert len(set(outcomes.values())) == 1
    assert "(rank 1) differs from" in outcomes[0]
    assert f"torch is 1.0 there and {torch.__version__.partition('+')[0]}" in outcomes[0]
    assert "code is abc there and " in outcomes[0]


def test_fingerprint_follows_the_code(tmp_path, monkeypatch):
    from dstrain import fingerprint as module

    (tmp_path / "dstrain").mkdir()
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "dstrain" / "a.py").write_text("2")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0  # and more\n")
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    before = module.fingerprint()
    assert differences(before, module.fingerprint()) == ""
    (tmp_path / "dstrain" / "a.py").write_text("3")
    assert differences(before, module.fingerprint()).startswith("code is ")


@pytest.mark.parametrize(
    ("address", "port", "says"),
    [
        (None, "29500", "MASTER_ADDR is missing"),
        ("localhost", None, "MASTER_PORT='' is no port"),
        ("localhost", "70000", "MASTER_PORT='70000' is no port"),
        ("no.such.host.invalid", "29500", "MASTER_ADDR=no.such.host.invalid MASTER_PORT=29500: the first rank did not"),
        ("127.0.0.1", "1", "the first rank did not answer"),
    ],
)  # fmt: skip
def test_an_address_that_does_not_answer(monkeypatch, address, port, says):
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=".*") as raised:
        rendezvous.connect(False, 0.3)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_ipv6_address(monkeypatch, address):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = rendezvous.connect(True, 5)
    store.set("key", "value")
    assert rendezvous.connect(False, 5).get("key") == b"value"


def test_a_port_that_is_taken(monkeypatch, store):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(UserError, match=f"MASTER_PORT={store.port} is in use"):
        rendezvous.connect(True, 5)


@pytest.mark.slow
def test_hosts_without_a_common_folder(tmp_path):
    """Each has a folder of the same name, as on disks of their own; nothing is trained."""
    fault = json.dumps({"kind": "own folder", "rank": 1, "step": 0})
    env = {"FAULT": fault, "OWN_FOLDER": str(tmp_path / "other")}
    process = launch(
        "--config", tiny_recipe(tmp_path), launcher="torchrun", ranks=2, env=env,
        script=REPOSITORY / "tests" / "faults.py",
    )  # fmt: skip
    assert process.returncode != 0
    assert "have folders of their own there; all hosts must share it" in process.stderr
    lines = process.stderr.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1  # and once in torchrun's own report
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert failure.read(tmp_path / "run") is None or failure.read(tmp_path / "run").status == 2
