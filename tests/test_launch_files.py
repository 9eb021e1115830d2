"""What launch/ holds besides running scripts: manifests against public schemas, the sweep, the page, the shell."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from running import REPOSITORY, clean_environment, tiny_recipe, wait_for

from dstrain import failure, hosts, on_host, remote
from dstrain.control import PREEMPTED
from dstrain.errors import UserError

LAUNCH = REPOSITORY / "launch"
SCHEMAS = Path(__file__).parent / "schemas"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])


def models(*names):
    return {
        name: fields
        for file in names
        for name, fields in json.loads((SCHEMAS / f"{file}.json").read_text())["models"].items()
    }


def problems(value, kind, known, where="") -> list[str]:
    """Return what is wrong with a value of a kind such as `V1Job`, `list[str]`, `dict(str, str)` or `int`."""
    kind = kind.removesuffix("!")
    if inner := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        return [
            fault for n, one in enumerate(value) for fault in problems(one, inner[1], known, f"{where}[{n}]")
        ]
    if inner := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            return [f"{where}: no mapping"]
        return [
            fault for key, one in value.items() for fault in problems(one, inner[1], known, f"{where}.{key}")
        ]
    if kind in known:
        if not isinstance(value, dict):
            return [f"{where}: no mapping"]
        fields = known[kind]
        unknown = [f"{where}.{key}: no field of {kind}" for key in value if key not in fields]
        missing = [
            f"{where}.{key}: missing" for key, of in fields.items() if of.endswith("!") and key not in value
        ]
        inside = [
            fault for key, one in value.items() if key in fields
            for fault in problems(one, fields[key], known, f"{where}.{key}")
        ]  # fmt: skip
        return unknown + missing + inside
    plain = {"str": str, "int": int, "float": (int, float), "bool": bool}.get(kind, object)
    wrong = not isinstance(value, plain) or (kind == "int" and isinstance(value, bool))
    return [f"{where}: {value!r} is no {kind}"] if wrong else []


KINDS = {"Job": "V1Job", "Service": "V1Service", "TrainJob": "TrainJob", "TrainingRuntime": "TrainingRuntime"}
VERSIONS = {"Job": "batch/v1", "Service": "v1", "TrainJob": "trainer.kubeflow.org/v1alpha1"}


@pytest.mark.parametrize("file", sorted((LAUNCH / "kubernetes").glob("*.yaml")), ids=lambda file: file.name)
def test_manifests_fit_their_schemas(file):
    known = models("kubernetes", "kubeflow")
    for document in yaml.safe_load_all(file.read_text()):
        kind = document["kind"]
        assert problems(document, KINDS[kind], known, kind) == []
        assert document["apiVersion"] == VERSIONS.get(kind, VERSIONS["TrainJob"])


def test_the_schema_check_finds_faults():
    known = models("kubernetes")
    job = next(
        d for d in yaml.safe_load_all((LAUNCH / "kubernetes" / "job.yaml").read_text()) if d["kind"] == "Job"
    )
    job["spec"]["completion"] = 2
    job["spec"]["parallelism"] = "2"
    del job["spec"]["template"]["spec"]["containers"][0]["name"]
    assert problems(job, "V1Job", known, "Job") == [
        "Job.spec.completion: no field of V1JobSpec",
        "Job.spec.parallelism: '2' is no int",
        "Job.spec.template.spec.containers[0].name: missing",
    ]


def test_the_indexed_job_agrees_with_itself():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes" / "job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == env["NUM_GPUS"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert spec["completionMode"] == "Indexed"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_trainjob_uses_its_runtime():
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes" / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"  # what Trainer looks for
    words = [*job["spec"]["trainer"]["command"], *job["spec"]["trainer"]["args"]]
    shell = words[2].replace(
        "exec launch/torchrun.sh", """exec bash -c 'printf "%s\\n" "$NODE_RANK of $NNODES" "$@"' stub"""
    )
    done = subprocess.run(
        ["bash", "-c", shell, *words[3:]], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin"} | {f"PET_{k}": v for k, v in (("NNODES", "2"), ("NODE_RANK", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1"))},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["1 of 2", "recipes/quickstart", "output_dir=/runs/quickstart"]


def test_skypilot_fits_its_documented_fields(tmp_path):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert problems(task, "Task", models("skypilot"), "task") == []
    assert task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (folder,) = task["file_mounts"]
    assert f'"output_dir={folder}/' in task["run"]
    said = run_in_stub(tmp_path, task["run"], SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1",
                       SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
                       SKYPILOT_TASK_ID="id-7", RECIPE="recipes/quickstart", OVERRIDES="train.max_steps=3 seed=7")  # fmt: skip
    assert said == [
        "2 1 8 10.0.0.1",
        "recipes/quickstart",
        "output_dir=/runs/id-7",
        "train.max_steps=3",
        "seed=7",
    ]


def run_in_stub(tmp_path, text, **environment):
    """Run a piece of shell with a launch/torchrun.sh that says what it was given."""
    for name, body in (
        (".venv/bin/activate", ""),
        (
            "launch/torchrun.sh",
            '#!/bin/bash\nprintf "%s\\n" "$NNODES $NODE_RANK $NUM_GPUS $MASTER_ADDR" "$@"\n',
        ),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    environment |= {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-euc", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_sweeps_command_is_one_that_train_py_takes(tmp_path):
    """As W&B's agent makes it, with its own functions, for values that it may draw; train.py then shows its batch."""
    from wandb.sdk.launch.sweeps import utils

    sweep = yaml.safe_load((LAUNCH / "sweep.yaml").read_text())
    drawn = {}
    for name, how in sweep["parameters"].items():
        assert how.keys() <= {"values", "value", "distribution", "min", "max"}
        drawn[name] = {"value": how["values"][-1] if "values" in how else how["min"]}
    filled = utils.create_sweep_command_args({"args": drawn})
    command = []
    for word in utils.create_sweep_command(list(sweep["command"])):
        macro = re.fullmatch(r"\$\{(\w+)\}", word)
        command += {"env": ["/usr/bin/env"], **filled}[macro[1]] if macro else [word]
    done = subprocess.run(
        [*command, "--dry-run"], cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
        env=clean_environment() | {"WANDB_RUN_ID": "trial7", "NUM_GPUS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"peak lr {drawn['train.learning_rate']['value']:g}" in done.stdout
    assert "ZeRO 2" in done.stdout
    assert re.search(r"output +runs/sweep/trial7", done.stdout)
    assert sweep["metric"]["name"] == "eval/loss"
    assert not (REPOSITORY / "runs" / "sweep" / "trial7").exists()


def test_scripts_are_safe():
    assert len(SCRIPTS) > 7
    for file in SCRIPTS:
        text = file.read_text()
        assert "eval " not in text, file
        if file.name != "lib.sh":  # sourced
            assert "\nset -euo pipefail\n" in text, file
            assert file.stat().st_mode & 0o111, file
        subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("name", ["single_node.sh", "multi_node.sh", "torchrun.sh", "mpirun.sh"])
def test_a_script_without_a_recipe_says_how_it_is_used(name):
    done = subprocess.run([str(LAUNCH / name)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"launch/{name} " in done.stderr
    assert "set -" not in done.stderr


def test_the_page_names_every_file():
    text = (LAUNCH / "README.md").read_text()
    for file in [*SCRIPTS, *LAUNCH.glob("*.yaml"), *(LAUNCH / "kubernetes").iterdir()]:
        assert file.name in text, file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=2\nb\n", ":2: 'b' has no slots; write: b slots=N"),
        ("a slots=2\n\n# all\nb slot=2\n", ":4: 'slot=2' is not slots=N; did you mean 'slots'?"),
        ("a slots=two\n", ":1: slots='two' is no number of ranks above 0"),
        ("a slots=0\n", ":1: slots='0' is no number of ranks above 0"),
        ("a slots=1\na slots=1\n", ":2: a is there twice; give it one line with all its slots"),
        ("a slots=1 gpu\n", ":1: 'gpu' after slots=1; a line is: HOST slots=N"),
        ("-oProxyCommand=x slots=1\n", ":1: '-oProxyCommand=x' is no host name or address"),
        ("# none\n", ": names no host; a line is: HOST slots=N"),
        ("slots=4\n", ":1: 'slots=4' is no host name or address"),
        ("a slots = 4\n", ":1: slots='' is no number of ranks above 0"),
        ("a slots=-1\n", ":1: slots='-1' is no number of ranks above 0"),
        ("a slots=4 max=5\n", ":1: 'max=5' after slots=4; a line is: HOST slots=N"),
    ],
)
def test_mistakes_in_a_hostfile(tmp_path, text, said):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        hosts.read_hostfile(file)
    assert str(caught.value).endswith(f"{file}{said}")


def test_a_hostfile(tmp_path):
    (tmp_path / "hosts").write_text("# two\n\nuser@node-1  slots=8  # first\n10.0.0.2 slots=4\n")
    assert hosts.read_hostfile(tmp_path / "hosts") == [("user@node-1", 8), ("10.0.0.2", 4)]
    with pytest.raises(UserError, match="cannot be read"):
        hosts.read_hostfile(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "value", "private"),
    [
        ("WANDB_API_KEY", "abc", True),
        ("HF_TOKEN", "hf_abc", True),
        ("MLFLOW_TRACKING_PASSWORD", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("HTTPS_PROXY", "http://me:word@proxy:80", True),
        ("NCCL_DEBUG_FILE", "a b", True),  # no secret, but a shell would split it
        ("HF_HOME", "/data/$USER", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("NCCL_SOCKET_IFNAME", "eth0", False),
        ("HTTPS_PROXY", "http://proxy:80", False),
    ],
)
def test_what_stays_out_of_command_lines(name, value, private):
    assert remote.carried({name: value}) == {name: value}
    assert remote.is_private(name, value) is private


def test_what_is_not_carried():
    assert (
        remote.carried(dict.fromkeys(("PATH", "HOME", "CUDA_VISIBLE_DEVICES", "DSTRAIN_RUN", "RANK"), "1"))
        == {}
    )


def test_a_mistake_in_deepspeed_env_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / ".deepspeed_env").write_text("\n# mine\nexport A=1\nB='two words'\n")
    assert remote.users_own() == {"A": "1", "B": "two words"}
    (tmp_path / ".deepspeed_env").write_text("A=1\nB\n")
    with pytest.raises(UserError, match=re.escape(".deepspeed_env:2: 'B' is not NAME=value")):
        remote.users_own()


def test_the_way_to_another_host():
    assert hosts.own_address("127.0.0.1") == "127.0.0.1"
    assert hosts.interface_to("127.0.0.1") == "lo"
    assert hosts.own_address("no such name") is None
    assert hosts.interface_to("no such name") is None


@pytest.mark.slow
def test_openmpi_ranks_find_their_place():
    code = "import os; from dstrain import distributed; print(distributed.world(), os.environ['RANK'], os.environ['LOCAL_RANK'])"
    place = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True,
        env=clean_environment() | {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()},
    )  # fmt: skip
    assert done.stdout == "World(rank=3, size=4, local_rank=1, local_size=2) 3 1\n"


@pytest.fixture
def gpu_machine(tmp_path):
    """Give an environment with eight GPUs, as far as the scripts can tell, whose launcher says what it was given."""
    tools = tmp_path / "bin"
    tools.mkdir()
    said = 'printf "%s\\n" "PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-}" "$@"\n'
    for name, body in (
        ("nvidia-smi", "printf 'GPU %s\\n' 1\n"),
        ("numactl", ""),
        ("nproc", "echo 16\n"),
        ("deepspeed", said),
        ("python", f'if [[ $* == *launch/torchrun.py* ]]; then {said}else exec {sys.executable} "$@"; fi\n'),
    ):
        (tools / name).write_text(f"#!/bin/bash\n{body}")
        (tools / name).chmod(0o755)
    environment = clean_environment()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "KMP_AFFINITY", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    return environment | {"PATH": f"{tools}:{environment['PATH']}"}


@pytest.mark.parametrize("name", ["single_node.sh", "torchrun.sh"])
def test_defaults_of_gpus_are_set_and_said(gpu_machine, tmp_path, name):
    recipe = str(tiny_recipe(tmp_path / "some recipe"))

    def start(**more):
        done = subprocess.run(
            [str(LAUNCH / name), recipe, "logging.run_name=b c"],
            env=gpu_machine | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-3:] == ["--config", recipe, "logging.run_name=b c"]
        return done.stdout.splitlines(), done.stderr

    given, wrong = start()
    assert given[0] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert ("--bind_cores_to_rank" in given) is (name == "single_node.sh")
    assert wrong.startswith("GPU defaults: PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert wrong.count("\n") == 1
    given, _ = start(PYTORCH_CUDA_ALLOC_CONF="backend:native", OMP_NUM_THREADS="4")
    assert given[0] == "PYTORCH_ALLOC_CONF="  # the user's own stays
    assert "--bind_cores_to_rank" not in given


def test_defaults_of_gpus_on_several_hosts(monkeypatch, capsys):
    import psutil

    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(list(cores)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 32 if logical else 16)
    place = {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "RANK": "0"}
    added = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8"}
    assert on_host._for_gpus(place) == added
    assert bound == [list(range(8, 16))]  # of the 16 cores, not of their second threads
    assert (
        "GPU defaults: PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=8"
        in capsys.readouterr().out
    )
    own = {"PYTORCH_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "4"}
    assert on_host._for_gpus(place | own) == {}
    assert len(bound) == 1


HERE = socket.gethostname()
SILENT = "ended without a word: its process 7 has gone; "
CRASHED = ("died", SILENT + "a signal or a crash ended it", 5)
BY_SIGNAL, BY_FILE = (
    {"event": "interrupted", "by": by, "time": "now"} for by in ("a signal", "the file STOP")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "host", "failed", "event", "ends", "last"),
    [
        (0, HERE, None, None, 0, None),
        (2, HERE, None, None, 2, None),
        (75, HERE, None, None, 75, None),
        (247, HERE, CRASHED, None, 5, f"error: rank 1 on {HERE}, step 3: {SILENT}its launcher saw SIGKILL"),
        (139, HERE, CRASHED, None, 5, f"error: rank 1 on {HERE}, step 3: {SILENT}its launcher saw SIGSEGV"),
        (247, "b", CRASHED, None, 5, f"error: rank 1 on b, step 3: {CRASHED[1]}"),  # seen by another launcher
        (5, HERE, CRASHED, None, 5, f"error: rank 1 on {HERE}, step 3: {CRASHED[1]}"),
        (1, "b", ("error", "ValueError: x", 1), None, 1, "error: rank 1 on b, step 3: ValueError: x"),
        (241, "b", ("error", "ValueError: x", 1), None, 1, "error: rank 1 on b, step 3: ValueError: x"),
        (
            0,
            HERE,
            CRASHED,
            None,
            5,
            f"error: rank 1 on {HERE}, step 3: {CRASHED[1]}",
        ),  # deepspeed without launch.py
        (0, HERE, None, BY_SIGNAL, 75, None),
        (143, HERE, None, BY_SIGNAL, 75, None),  # the launcher died of it, and the ranks saved
        (143, HERE, None, BY_FILE, 0, None),
        (
            0,
            HERE,
            None,
            {"event": "start", "hosts": [HERE], "time": "now"},
            5,
            "error: the run ended before its last step, and no rank could say why",
        ),
        (0, HERE, None, {"event": "start", "hosts": [HERE, "b"], "time": "now"}, 0, None),
        (0, HERE, None, {"event": "finished", "time": "now"}, 0, None),
        (
            1,
            HERE,
            None,
            None,
            1,
            "error: the run ended with status 1, and no rank has recorded why; see above",
        ),
        (
            255,
            HERE,
            None,
            None,
            255,
            "error: the run ended with status 255, and no rank has recorded why; see above",
        ),
        (137, HERE, None, None, 5, "error: the run was ended by SIGKILL before a rank could say why"),
    ],
)
def test_the_first_failure_is_the_last_thing_on_the_screen(
    gpu_machine, tmp_path, status, host, failed, event, ends, last
):
    """Whatever a launcher makes of a rank's status, the script ends with train.py's."""
    recipe, logs = tiny_recipe(tmp_path), tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    failure.record(logs, failure.Failure("error", 0, "of an earlier run", 1, time="earlier"))
    (logs / "events.jsonl").write_text(json.dumps(BY_SIGNAL | {"time": "earlier"}) + "\n")
    write = ""
    if failed:
        kind, error, code = failed
        told = failure.Failure(kind, 1, error, code, host=host, step=3, phase="step")
        (tmp_path / "told").write_text(failure.to_json(told))
        write += f"cp {tmp_path}/told {logs}/failure.json\n"
    if event:
        (tmp_path / "event").write_text(json.dumps(event) + "\n")
        write += f"cat {tmp_path}/event >>{logs}/events.jsonl\n"
    (tmp_path / "bin" / "deepspeed").write_text(f"#!/bin/bash\n{write}exit {status}\n")
    done = subprocess.run(
        [str(LAUNCH / "single_node.sh"), str(recipe)],
        env=gpu_machine,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ends, done.stderr
    assert done.stderr.splitlines()[1:] == ([last] if last else [])
    if last and "launcher saw" in last:
        assert "launcher saw" in failure.read(tmp_path / "run").error  # for diagnose


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_signals_to_the_group_of_a_script_do_not_end_it_before_its_launcher(gpu_machine, tmp_path, times):
    """As Ctrl-C in a terminal, once and again, and as a batch system that signals every process."""
    save = f"trap 'sleep 3; echo saved >{tmp_path}/saved; exit 75' USR1\ntouch {tmp_path}/ready\n"
    (tmp_path / "bin" / "deepspeed").write_text(f"#!/bin/bash\n{save}while :; do sleep 0.1; done\n")
    process = subprocess.Popen(
        [str(LAUNCH / "single_node.sh"), str(tiny_recipe(tmp_path))], env=gpu_machine, start_new_session=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for((tmp_path / "ready").exists)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(30) == PREEMPTED
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_signal_between_two_attempts_is_heard(gpu_machine, tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "bin" / "deepspeed").write_text(f"#!/bin/bash\necho started >>{tmp_path}/starts\nexit 1\n")
    python = tmp_path / "bin" / "python"
    slow = python.read_text().replace("#!/bin/bash\n", "#!/bin/bash\n[[ $* == *' words '* ]] && sleep 2\n")
    python.write_text(slow)
    process = subprocess.Popen(
        [str(LAUNCH / "single_node.sh"), str(recipe)],
        env=gpu_machine | {"RESTARTS": "3"},
        stderr=subprocess.DEVNULL,
    )
    wait_for((tmp_path / "starts").exists)
    time.sleep(0.7)
    process.terminate()
    assert process.wait(30) == PREEMPTED
    assert (tmp_path / "starts").read_text() == "started\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_node.sh", "torchrun.sh", "mpirun.sh", "multi_node.sh"])
def test_a_mistake_in_a_recipe_is_said_before_anything_is_started(gpu_machine, tmp_path, name):
    (tmp_path / "bin" / "mpirun").symlink_to("/bin/false")
    (tmp_path / "hosts").write_text("192.0.2.9 slots=1\n")  # nobody's
    more = ["--hostfile", str(tmp_path / "hosts")] if name == "multi_node.sh" else []
    done = subprocess.run(
        [str(LAUNCH / name), str(tiny_recipe(tmp_path)), *more, "train.max_step=3"],
        env=gpu_machine | {"NP": "1", "HOSTFILE": str(tmp_path / "hosts")}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith(
        "unknown key 'train.max_step'; did you mean 'train.max_steps'?"
    )
    assert sum("error" in line for line in done.stderr.splitlines()) == 1


def test_a_screen_that_is_gone_does_not_end_a_rank():
    code = (
        "import sys, time; from dstrain.control import Unbroken\n"
        "sys.stdout = Unbroken(sys.stdout)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "for n in range(5): print('lost', flush=True)\n"
        "print('alive', file=sys.stderr); import os; sys.stdout.flush(); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "alive\n"
    assert process.wait(20) == 0
    process.stderr.close()
