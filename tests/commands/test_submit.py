"""What is written for a cluster: it says what was asked for, refuses what cannot be meant, and runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml

from ddp_course.commands import submit
from ddp_course.launcher import janitor
from tests.programs.running import PROGRAMS, edited
from tests.waiting import wait_for

SLURM, SCRIPT = ["--slurm"], ["--", "python", "train.py"]
# What the operator publishes of its job, as far as the form uses it.
SCHEMA = yaml.safe_load(Path(__file__).with_name("pytorchjob_schema.yaml").read_text())
K8S = ["--k8s", "--image", "registry.example/course:1"]


def written(capsys, *words: str) -> str:
    assert submit.main([*words, *([] if "--" in words else SCRIPT)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        submit.main([*words, *([] if "--" in words else SCRIPT)])
    assert ended.value.code == 2
    return capsys.readouterr().err


# --- SLURM -----------------------------------------------------------------------------------------


def test_the_script_asks_for_what_was_said(capsys):
    more = ["--nodes", "3", "--gpus-per-node", "4", "--cpus-per-rank", "6", "--time", "1-02:30:00", "--grace", "90"]
    text = written(capsys, *SLURM, *more, "--name", "run7", "--account", "lab", *SCRIPT, "--epochs", "9")
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert asked == {
        "job-name": "run7",
        "nodes": "3",
        "ntasks-per-node": "1",  # the agent; it starts the ranks
        "cpus-per-task": "24",  # of all ranks of a node
        "gpus-per-node": "4",
        "time": "1-02:30:00",
        "output": "%x-%j.log",
        "account": "lab",
        "open-mode": "append",
        "requeue": "",
        "signal": "B:TERM@90",
    }
    assert "--nproc-per-node=4" in text and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=80" in text
    # sbatch reads no directive below the first command.
    lines = [line for line in text.splitlines() if line]
    assert not any(line.startswith("#SBATCH") for line in lines[next(i for i, x in enumerate(lines) if x[0] != "#") :])


@pytest.mark.parametrize("time, full", [("1:30", "0-01:30:00"), ("100:00:05", "4-04:00:05"), ("2-00:07", "2-00:07:00")])
def test_a_time_means_the_same_to_slurm(capsys, time, full):
    assert f"#SBATCH --time={full}\n" in written(capsys, *SLURM, "--time", time)


def test_nodes_without_gpus_are_not_asked_for_any(capsys):
    text = written(capsys, *SLURM, "--gpus-per-node", "0", "--ranks-per-node", "2")
    assert "gpus" not in text and "--nproc-per-node=2" in text


@pytest.mark.parametrize("nasty", ["it's", 'a "b"', "$(touch owned)", "`touch owned`", "a; touch owned", "@name@"])
def test_no_value_is_taken_for_shell(capsys, tmp_path, nasty):
    """bash itself reads the list back."""
    text = written(capsys, "--slurm", *SCRIPT, f"/shared/{nasty}", "--root", nasty)
    line = next(line for line in text.splitlines() if line.startswith("script="))
    script = f'{line}\nprintf "%s\\n" "${{script[@]}}"'
    out = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["train.py", f"/shared/{nasty}", "--root", nasty]
    assert list(tmp_path.iterdir()) == []
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


# --- Kubernetes ------------------------------------------------------------------------------------


def test_the_job_asks_for_what_was_said(capsys):
    more = ["--nodes", "1:3", "--gpus-per-node", "2", "--time", "2:00", "--grace", "90", "--memory", "32Gi"]
    job = yaml.safe_load(written(capsys, *K8S, *more, "--", "python3.11", "-m", "mine.train", "--epochs", "9"))
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert spec["elasticPolicy"]["minReplicas"] == 1 and spec["elasticPolicy"]["maxReplicas"] == 3
    assert spec["runPolicy"]["activeDeadlineSeconds"] == 7200
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (3, "OnFailure")
    pod = worker["template"]["spec"]
    container = pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert container["resources"]["limits"] == {"cpu": 8, "memory": "32Gi", "nvidia.com/gpu": 2}
    args = container["args"]
    assert args[-4:] == ["-m", "mine.train", "--epochs", "9"] and "--nproc-per-node=2" in args
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"checkpoints": "/checkpoints", "shared-memory": "/dev/shm"}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("nasty", ["a: b", "- x", "#no", "yes", "{a}", "$(POD_IP)", 'say "so"', "@name@"])
def test_no_value_is_taken_for_yaml(capsys, nasty):
    job = yaml.safe_load(written(capsys, *K8S, *SCRIPT, "--root", nasty))
    args = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"]
    assert args[-1].replace("$$", "$") == nasty
    assert "$" not in nasty or args[-1] == "$$(POD_IP)"  # not to be replaced by the pod's address


@pytest.mark.parametrize(
    "more", [[], ["--gpus-per-node=0"], ["--nodes=1:4", "--max-restarts=0", *SCRIPT, "--epochs=9"]]
)
def test_the_operator_takes_the_job(capsys, more):
    jsonschema.validate(yaml.safe_load(written(capsys, *K8S, *more)), SCHEMA)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("rdzvId: ", "rdzvID: "),
        ("backoffLimit: 3", 'backoffLimit: "3"'),
        ("restartPolicy: OnFailure", "restartPolicy: Sometimes"),
        ("Worker:", "Helper:"),
        ("- name: pytorch ", "- name: torch "),
        ("containerPort: 23456", "port: 23456"),
        ("claimName: checkpoints", "claim: checkpoints"),
        ("memory: 16Gi", "memory: 16 GB"),
        ('value: "1"', "value: 1"),
    ],
)
def test_the_operator_refuses_what_it_does_not_know(capsys, right, wrong):
    text = written(capsys, *K8S)
    assert right in text
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace(right, wrong)), SCHEMA)


# --- What cannot be meant --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "one of the arguments --slurm --k8s is required"),
        (["--slurm", "--"], "what runs on each rank? Give it after --"),
        ([*SLURM, "--nodes", "1:2"], "SLURM gives a fixed number"),
        ([*SLURM, "--nodes", "0"], "--nodes '0': expected a number"),
        ([*SLURM, "--nodes", "3:2"], "--nodes '3:2'"),
        ([*SLURM, "--name", "a b"], "--name 'a b': expected"),
        ([*SLURM, "--name", "x\n#SBATCH --uid=0"], "--name"),
        ([*SLURM, "--account", "x --uid=0"], "--account 'x --uid=0': expected"),
        ([*SLURM, "--time", "90"], r"--time '90': expected [DAYS-]HOURS:MINUTES[:SECONDS]"),
        ([*SLURM, "--time", "0:06"], "must be 300 s more than the --grace of 120 s"),
        ([*SLURM, "--gpus-per-node", "2", "--ranks-per-node", "2"], "for nodes without GPUs"),
        ([*SLURM, "--gpus-per-node", "-1"], "--gpus-per-node -1: must be at least 0"),
        ([*SLURM, "--image", "x"], "--image is for --k8s only"),
        (["--k8s"], "--k8s needs an --image"),
        ([*K8S, "--mount", "here"], "--mount 'here': expected an absolute path"),
        ([*SLURM, "--mount", "/here"], "--mount is for --k8s only"),
        ([*K8S, "--partition", "gpu"], "--partition is for --slurm only"),
        ([*K8S, "--memory", "16"], "--memory '16': expected an amount such as 16Gi"),
        ([*K8S, "--image", "a b"], "--image 'a b'"),
        ([*SLURM, "--", "python"], "what runs on each rank?"),
        ([*SLURM, "--", "--epochs", "3"], "expected python and a script"),
        ([*SLURM, "--", "python", "-m"], "expected python and a script"),
        ([*SLURM, "--", "torchrun", "--nproc-per-node=2", "train.py"], "leave torchrun and its options out"),
    ],
)
def test_mistakes_show_here_and_not_in_the_queue(capsys, words, says):
    assert says in refused(capsys, *words)


def test_the_output_goes_to_a_file(capsys, tmp_path):
    file = tmp_path / "run7.sbatch"
    assert submit.main([*SLURM, "--output", str(file), *SCRIPT]) == 0
    assert capsys.readouterr().out == "" and "# Submit with: sbatch run7.sbatch\n" in file.read_text()
    assert submit.main([*SLURM, "--output", str(tmp_path / "no" / "x"), *SCRIPT]) == 1
    assert "cannot write" in capsys.readouterr().err


# --- The script runs -------------------------------------------------------------------------------

# Two "nodes" on loopback instead of a cluster's. Each does what the real one is documented to do.
COMMANDS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for id in 0 1; do
  SLURM_NODEID=$id SLURMD_NODENAME=127.0.0.1 "$@" & echo $! >> "$CLUSTER/agents"
done
status=0
for agent in $(jobs -p); do wait "$agent" || status=$?; done
exit $status""",
    "scancel": '[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] && kill -TERM $(cat "$CLUSTER/agents")',
    "scontrol": """
case "$1 $2" in
  "show hostnames") printf '%s\\n' 127.0.0.1 127.0.0.1;;
  "show job") echo JobState=RUNNING;;
  "requeue $SLURM_JOB_ID") echo "$2" > "$CLUSTER/requeued";;
esac""",
}


def cluster(folder: Path) -> dict[str, str]:
    """Return the variables of a job in this cluster, with its commands on the PATH."""
    (folder / "bin").mkdir()
    for name, body in COMMANDS.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": str(job_with_a_free_port()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    return dict(os.environ) | job | {"PATH": path, "CLUSTER": str(folder), "SUBMIT_TEST": str(os.getpid())}


MARK = f"SUBMIT_TEST={os.getpid()}"  # known by it, whatever becomes of the job


def job_with_a_free_port() -> int:
    for job in range(1 + os.getpid() % 19000, 20000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 10000 + job)):
                return job
    raise AssertionError("every port is taken")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_that_is_told_to_stop_saves_and_goes_on_from_there(capsys, tmp_path):
    """The job runs the lessons' program, which saves when SIGTERM comes; an epoch of it has 30 steps."""

    def lasting(epochs: int) -> str:
        old = "EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3,"
        return str(edited(PROGRAMS / "train_resumable.py", tmp_path, (old, old.replace("3", str(epochs)))))

    checkpoint = tmp_path / "my run.pt"
    where = ["--gpus-per-node=0", "--cpus-per-rank=1", "--grace=40", "--python", sys.executable]
    script = written(capsys, "--slurm", *where, "--", "python", lasting(1000), str(checkpoint))
    variables = cluster(tmp_path)
    job = start(script, variables)
    try:
        wait_for(checkpoint.exists, lambda: job.poll() is None, "no checkpoint")
        job.send_signal(signal.SIGTERM)  # as SLURM does with --signal=B:TERM, to this script only
        out, _ = job.communicate(timeout=100)
    finally:
        end(job)
    assert job.returncode != 0, out
    assert (tmp_path / "requeued").read_text().strip() == variables["SLURM_JOB_ID"], out
    stopped_at = torch.load(checkpoint, weights_only=True)["step"]
    assert 0 < stopped_at < 1000 * 30 and f"rank 1 leaves after step {stopped_at}" in out

    (tmp_path / "agents").unlink()
    (tmp_path / "requeued").unlink()
    epochs = stopped_at // 30 + 2
    lasting(epochs)
    job = start(script, variables)
    try:
        out, _ = job.communicate(timeout=100)
    finally:
        end(job)
    assert job.returncode == 0, out
    assert f"2 ranks start after step {stopped_at}" in out
    assert torch.load(checkpoint, weights_only=True)["step"] == 30 * epochs
    assert not (tmp_path / "requeued").exists()


def start(script: str, variables: dict[str, str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-c", script], env=variables, **pipes)


def end(job: subprocess.Popen) -> None:
    """End the job with its agents and their ranks, which torchrun gives sessions of their own."""
    janitor.kill_marked(MARK)
    job.kill()
    job.communicate()
