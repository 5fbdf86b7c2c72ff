"""Each verdict, on machines that are planted; then the doctor on this one."""

import json
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from ddp_course.commands import doctor
from ddp_course.diagnose import machine_facts, network
from ddp_course.diagnose.machine_checks import CHECKS, diagnose
from ddp_course.diagnose.machine_facts import Facts, Storage, import_apart, look_at_folder, output_of
from ddp_course.diagnose.network import Interface, gloo_address, nccl_interfaces
from ddp_course.diagnose.verdict import Verdict, table

pytestmark = pytest.mark.timeout(180)

NMS = "RuntimeError: operator torchvision::nms does not exist"


def env(**variables):
    return {"environ": variables}


def named(*addresses, **planted):
    return {"host_addresses": addresses, **planted}


WANTS_2_11 = {"torchvision_wants": "torch (==2.11.0)"}
OLD_DRIVER = {"nvidia_driver": True, "gpus": ("A",), "driver": "550.54.15", "driver_cuda": "12.4"}
NCCL_WISH = "nvidia-nccl-cu13==2.30.7"
NCCL = {"nccl": "2.30.7", "nccl_wants": NCCL_WISH}
FAR = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
MIXED = {(0, 1): "SYS", (0, 2): "PIX", (1, 2): "SYS"}
ELSEWHERE = {"environ": {"MASTER_ADDR": "10.0.0.9"}, "master_addresses": ("10.0.0.9",)}  # ranks on another machine
IB0_DOWN = (Interface("eth0", ("10.0.0.5",)), Interface("ib0", ("10.1.0.5",), up=False))
ALONE = (Interface("lo", ("127.0.0.1",), loopback=True),)
DOZEN = tuple(Interface(f"v{n}", (f"10.0.1.{n}", "fe80::1")) for n in range(12))
TAKEN = {"master_port_error": "in use"}
AGENT = {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}

# The name of the check, what is planted, the state it must give, what it must find, a part of its cure.
PLANTED = [
    ("Python", {"python": "3.10.14"}, "problem", "3.10.14", "3.11 or newer"),
    ("torch", {"torch": None}, "problem", "not installed", "make env"),
    ("torch", {"torch": "1.13.1+cpu"}, "problem", "1.13.1+cpu, older than 2.11", "make env TORCH=cpu"),
    ("torch", {"torch": "2.9.1"}, "problem", "2.9.1, older than 2.11", "make env"),  # although "2.9" > "2.11" as texts
    ("torch", {"torch": "2.11.0"}, "ok", "2.11.0", ""),
    ("torch", {"torch_error": "OSError: libcudart"}, "problem", "cannot be imported: OSError: libcudart", "make env"),
    ("torchvision", {"torchvision": None}, "warning", "not installed", "make env"),
    ("torchvision", {"torch": None}, "warning", "not tried without torch", "fix torch first"),
    ("torchvision", {"torchvision_error": "no jpeg"}, "problem", "+cpu; torchvision cannot be imported: no j", "make"),
    ("torchvision", {"torch": "2.15.0+cu132"}, "warning", "different builds", "make env, which takes both"),
    ("torchvision", {"torch": "2.13.0+cpu"}, "warning", "wants torch>=2.14.0, found torch 2.13.0+cpu", "make env"),
    ("torchvision", {"torch": "2.11.0+cpu", **WANTS_2_11}, "ok", "0.29.2+cpu", ""),
    ("torchvision", {"torch": "2.11.1+cpu", **WANTS_2_11}, "warning", "wants torch (==2.11.0)", "make env"),
    ("GPUs", {"nvidia_driver": True}, "warning", "torch sees no GPU", "TORCH=default"),
    ("gloo", {"gloo": False}, "problem", "ranks on the CPU cannot talk", "make env"),
    ("loopback", {"loopback": None}, "problem", "no connection to 127.0.0.1", "ip link set lo up"),
    ("shared memory", {"shm_bytes": 64 * 2**20}, "warning", "64 MiB in /dev/shm: NCCL", "--shm-size=1g"),
    ("shared memory", {"shm_bytes": None}, "warning", "no /dev/shm: NCCL", "--shm-size=1g"),
    ("shared memory", {"shm_bytes": None, "linux": False}, "ok", "none needed", ""),
    ("cores", {"cores": 1}, "warning", "all ranks share it", "nothing"),
    ("temporary files", {"temp_error": "No space left"}, "problem", "cannot write in /tmp: No space left", "TMPDIR"),
    ("Jupyter kernel", {"kernel": False}, "warning", "none for this Python", "--sys-prefix"),
    ("launcher", env(RANK="1"), "problem", "RANK=1: WORLD_SIZE is missing", "unset RANK"),
    ("launcher", env(MASTER_PORT="29500"), "warning", "MASTER_PORT=29500", "unset MASTER_PORT"),
    ("launcher", env(RANK="2", WORLD_SIZE="2"), "problem", "from 0 to WORLD_SIZE - 1", "unset RANK"),
    ("launcher", env(RANK="x", WORLD_SIZE="2"), "problem", "RANK is not a number from 0", "unset"),
    ("launcher", {"gpus": ("A", "B"), "environ": {"LOCAL_RANK": "2"}}, "problem", "there are 2", "unset LOCAL_RANK"),
    ("launcher", env(MASTER_ADDR="node0"), "problem", "MASTER_ADDR resolves to nothing", "unset MASTER"),
    ("launcher", {"environ": FAR, "master_addresses": ("127.0.0.1",)}, "problem", "2 ranks are on other", "unset"),
    ("launcher", {"environ": FAR, "master_addresses": ("10.0.0.1",)}, "warning", "would join", "unset"),
    ("CUDA", {"cuda": "13.2"}, "ok", "13.2 in this torch; no NVIDIA driver here", ""),
    ("CUDA", {"cuda": "13.2", **OLD_DRIVER}, "problem", "13.2, driver 550.54.15 is for CUDA up to 12.4", "CUDA 12"),
    ("CUDA", {"cuda": "12.8", **OLD_DRIVER}, "ok", "driver 550.54.15, for CUDA up to 12.4", ""),  # same major number
    ("NCCL", {"gpus": ("A",)}, "problem", "built without it", "make env"),
    ("NCCL", {**NCCL, "nccl_package": "2.30.7"}, "ok", "2.30.7", ""),
    ("NCCL", {**NCCL, "nccl_package": "2.21.5"}, "warning", "found 2.21.5", NCCL_WISH),
    ("GPU links", {"gpus": ("A", "B")}, "ok", "unknown", ""),
    ("GPU links", {"gpus": ("A", "B"), "links": {(0, 1): "SYS"}}, "ok", "SYS between 2 GPUs", ""),  # no nearer pair
    ("GPU links", {"gpus": tuple("ABC"), "links": MIXED}, "warning", "PIX, SYS: GPU0 and GPU1", "DEVICES=0,2"),
    ("interfaces", env(GLOO_SOCKET_IFNAME="ib0"), "problem", "no address here; found lo, eth0", "IFNAME=eth0"),
    ("interfaces", env(GLOO_SOCKET_IFNAME="^lo"), "problem", "^ and = are NCCL's", "GLOO_SOCKET_IFNAME=eth0"),
    ("interfaces", env(NCCL_SOCKET_IFNAME="ib"), "problem", "NCCL_SOCKET_IFNAME=ib fits none", "=eth0"),
    ("interfaces", {"interfaces": ()}, "ok", "unknown", ""),
    ("interfaces", {"interfaces": IB0_DOWN}, "ok", "eth0 10.0.0.5; gloo would take eth0 (10.0.0.5), NCCL eth0", ""),
    ("interfaces", {"interfaces": ALONE}, "ok", "loopback alone; gloo would take lo (127.0.0.1), NCCL lo", ""),
    ("interfaces", {"interfaces": DOZEN}, "ok", "v0 10.0.1.0, v1 10.0.1.1, v2 10.0.1.2, v3 10.0.1.3 and 8 more", ""),
    ("host name", named("127.0.1.1"), "ok", "before you use several: export GLOO_SOCKET_IFNAME=eth0", ""),
    ("host name", named("127.0.1.1", **ELSEWHERE), "warning", "would announce 127.0.1.1", "IFNAME=eth0"),
    ("host name", named("10.9.9.9", **ELSEWHERE), "warning", "which no interface here has", "fix /etc/hosts"),
    ("host name", named(host_error="Unknown", **ELSEWHERE), "warning", "to nothing (Unknown)", "=eth0"),
    ("host name", named("127.0.1.1", **env(GLOO_SOCKET_IFNAME="eth0")), "ok", "was named", ""),
    ("host name", named("127.0.1.1", interfaces=ALONE), "ok", "no network", ""),
    ("ports", {"port_error": "Address not available"}, "problem", "Address not available", "ip_local_port_range"),
    ("ports", env(MASTER_PORT="29500"), "ok", "29500 is free", ""),
    ("ports", env(MASTER_PORT="99999"), "problem", "not a port", "29500"),
    ("ports", {"environ": {"MASTER_PORT": "29500"}, **TAKEN}, "problem", "cannot be opened: in use", "sport = :29500"),
    ("ports", {"environ": {"MASTER_PORT": "29500", "RANK": "1"}, **TAKEN}, "ok", "by rank 0, not here", ""),
    ("ports", {"environ": {"MASTER_PORT": "29500", **AGENT}, **TAKEN}, "ok", "by torchrun's own store", ""),
    ("threads", env(OMP_NUM_THREADS="4"), "ok", "4 for each of 1 ranks, 4 cores", ""),
    ("threads", env(OMP_NUM_THREADS="2", LOCAL_WORLD_SIZE="4"), "warning", "of 4 ranks", "THREADS=1"),
    ("threads", env(OMP_NUM_THREADS="many"), "warning", "not a number", "unset"),
    ("checkpoints", {"storage": Storage()}, "ok", "/data/checkpoints (ext2/ext3, of this machine), 100.0 GiB free", ""),
    ("checkpoints", {"storage": Storage(kind="nfs")}, "ok", "(nfs, shared over the network)", ""),
    ("checkpoints", {"storage": Storage(error="Read-only")}, "problem", "/data/checkpoints: Read-only", "name another"),
    ("checkpoints", {"storage": Storage(atomic_rename=False)}, "problem", "does not replace a file", "another file"),
    ("checkpoints", {"storage": Storage(free_bytes=2**29)}, "warning", "0.5 GiB free: little space", "at once"),
    ("checkpoints", {"storage": Storage(locks=False)}, "warning", "does not keep another process out", "no two runs"),
    ("checkpoints", {"storage": Storage(kind="tmpfs")}, "warning", "gone after a restart", "on a disk"),
]


@pytest.mark.parametrize(("name", "planted", "state", "found", "cure"), PLANTED)
def test_a_planted_fault_gets_its_verdict(name, planted, state, found, cure):
    got = Verdict(name, *CHECKS[name](replace(Facts(), **planted)))
    assert got.state == state
    assert found in got.found
    assert cure in got.cure and bool(cure) == bool(got.cure)


def test_a_good_machine_has_nothing_to_fix():
    verdicts = diagnose(Facts())
    assert {(v.state, v.cure) for v in verdicts} == {("ok", "")}
    assert table(verdicts).endswith("19 checks: 0 problems, 0 warnings")


def test_a_mismatched_pair_names_both_builds_and_the_cure():
    planted = {"torch": "2.15.0+cpu", "torchvision": "0.29.2+cu132", "torchvision_error": NMS}
    state, found, cure = CHECKS["torchvision"](replace(Facts(), **planted))
    pair = "torch 2.15.0+cpu and torchvision 0.29.2+cu132 come from different builds"
    assert (state, found) == ("problem", f"{pair}; torchvision cannot be imported: {NMS}")
    assert cure.startswith("rm -rf .venv && make env TORCH=cpu, which takes both from one build")


# --- Looking around --------------------------------------------------------------------------------


def test_an_import_that_talks_fails_crashes_or_hangs_does_not_reach_us():
    assert import_apart("print('hello'); found = {'version': '1'}") == ({"version": "1"}, "")
    assert import_apart("raise RuntimeError('operator torchvision::nms does not exist')") == ({}, NMS)
    assert import_apart("import os; os.abort()")[1] != ""
    assert import_apart("import time; time.sleep(60)", limit_s=0.5) == ({}, "no answer within 0.5 s")


def test_a_version_is_read_with_its_build_without_an_import():
    import torch

    assert machine_facts.installed("torch") == torch.__version__
    assert machine_facts.installed("no-such-package") is None


def test_only_a_kernel_of_this_python_counts(tmp_path):
    pytest.importorskip("ipykernel")
    assert machine_facts.has_kernel(tmp_path, "/env/bin/python") is False  # none at all
    file = tmp_path / "share/jupyter/kernels/python3/kernel.json"
    file.parent.mkdir(parents=True)
    for starts, expected in (("python", True), ("/env/bin/python3", True), ("/other/bin/python", False)):
        file.write_text(json.dumps({"argv": [starts, "-m", "ipykernel_launcher"]}))
        assert machine_facts.has_kernel(tmp_path, "/env/bin/python") is expected


def test_a_folder_is_tried_and_left_empty_or_says_why_not(tmp_path, monkeypatch):
    found = look_at_folder(str(tmp_path))
    assert (found.error, found.atomic_rename, found.locks) == ("", True, True)
    assert found.free_bytes > 0 and list(tmp_path.iterdir()) == []
    assert look_at_folder(str(tmp_path / "missing")).error == "No such file or directory"
    if sys.platform == "linux":
        assert look_at_folder("/dev/shm").kind == "tmpfs"

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(machine_facts.os, "replace", fail)
    monkeypatch.setattr("fcntl.lockf", lambda *_: None)  # here nothing is locked, so the other process gets the lock
    found = look_at_folder(str(tmp_path))
    assert (found.error, found.atomic_rename, found.locks) == ("", False, False)


def test_a_command_that_is_missing_fails_or_hangs_tells_nothing():
    assert output_of("echo", "topo") == "topo\n"
    assert output_of("sh", "-c", "echo x; exit 9") == output_of("sleep", "60", limit_s=0.3) == ""
    assert output_of("no-such-command") == ""


EIGHT = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tSYS\tPXB\tSYS\t0-23,96-119\t0\t\tN/A
GPU1\tNV12\t X \tPIX\tSYS\tPXB\tSYS\t0-23,96-119\t0\t\tN/A
GPU2\tNV12\tPIX\t X \tSOC\tSYS\tNODE\t24-47,120-143\t1\t\tN/A
GPU3\tSYS\tSYS\tSOC\t X \tSYS\tNODE\t24-47,120-143\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS

Legend:

  X    = Self
  NV#  = over # NVLinks
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"


def test_what_nvidia_smi_prints_is_read():
    links = {(0, 1): "NV12", (0, 2): "NV12", (0, 3): "SYS", (1, 2): "PIX", (1, 3): "SYS", (2, 3): "SYS"}
    assert machine_facts.parse_links(EIGHT) == links  # SOC: SYS in old drivers
    for text in (ONE, "", "Failed to initialize NVML: Driver/library version mismatch", "\tGPU0\tGPU1\n"):
        assert machine_facts.parse_links(text) == {}
    head = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
    assert machine_facts.parse_driver(head) == ("550.54.15", "12.4")
    assert machine_facts.parse_driver("| Driver Version: 580.95.05  CUDA Version: N/A |") == ("580.95.05", "")
    assert machine_facts.parse_driver("") == (None, "")


# --- What gloo and NCCL would choose ---------------------------------------------------------------

MANY = (
    Interface("lo", ("127.0.0.1", "::1"), loopback=True),
    Interface("docker0", ("172.17.0.1",)),
    Interface("eth0", ("10.0.0.5", "fe80::1")),
    Interface("eth1", ("192.168.7.5",)),
)
NAMES = [each.name for each in MANY]


def test_nccl_reads_prefixes_whole_names_and_exclusions():
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "eth"}, NAMES) == ["eth0", "eth1"]
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "=eth"}, NAMES) == []
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "=eth1,eth0"}, NAMES) == ["eth0", "eth1"]
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "^docker,lo"}, NAMES) == ["eth0", "eth1"]
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "^=eth0"}, NAMES) == ["lo", "docker0", "eth1"]
    assert nccl_interfaces({"NCCL_SOCKET_IFNAME": "eth1,lo"}, NAMES) == ["lo", "eth1"]


def test_nccl_without_orders_prefers_infiniband_and_takes_bridges_last():
    chosen = [nccl_interfaces({}, names) for names in ([*NAMES, "ib0"], NAMES, NAMES[:2], NAMES[:1], [])]
    assert chosen == [["ib0"], ["eth0", "eth1"], ["docker0"], ["lo"], []]


def test_gloo_takes_its_interface_then_its_host_name_then_loopback():
    assert gloo_address({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, MANY, ("10.0.0.5",)) == "192.168.7.5"
    assert gloo_address({"GLOO_SOCKET_IFNAME": "eth"}, MANY, ("10.0.0.5",)) is None
    assert gloo_address({}, MANY, ("10.9.9.9", "192.168.7.5")) == "192.168.7.5"
    assert gloo_address({}, MANY, ("127.0.1.1",)) == "127.0.1.1"
    assert gloo_address({}, MANY, ("10.9.9.9",)) == "127.0.0.1"


def test_this_machines_interfaces_are_those_that_the_system_names():
    found = {each.name: each for each in network.interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    lo = next(each for each in found.values() if each.loopback)
    assert lo.up and "127.0.0.1" in lo.addresses
    assert network.interface_of("127.0.1.1", found.values()) == lo.name  # no interface lists it, and it is loopback's
    assert network.interface_of("203.0.113.9", found.values()) is None
    assert network.source_address("127.0.0.1") == "127.0.0.1"


def test_ports_and_names_say_why_they_cannot_be_used():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in machine_facts.error_of_binding(port)  # all addresses: one of them is taken
    assert machine_facts.error_of_binding(port) == ""
    assert machine_facts.error_of_binding(70_000) != ""
    assert "127.0.0.1" in network.resolve("127.0.0.1")[0]
    for name in ("no-such-host.invalid", "." * 300):  # the second is not even a name
        assert network.resolve(name)[0] == () and network.resolve(name)[1]


# --- Telling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ({}, ["Python", "torch", "GPUs", "cores", "ranks"]),
        ({"shm_bytes": 1}, ["Python", "torch", "GPUs", "shared memory", "cores", "ranks"]),
        ({"loopback": None}, ["Python", "torch", "GPUs", "loopback", "cores", "ranks"]),
        ({"torch_error": "ImportError: no such symbol"}, ["Python", "torch", "torchvision", "GPUs", "cores"]),
    ],
)
def test_the_short_form_has_what_a_learner_needs_and_what_is_wrong(monkeypatch, capsys, planted, told):
    monkeypatch.setattr(doctor, "gather_facts", lambda checkpoint: replace(Facts(), **planted))
    monkeypatch.setattr(doctor, "start_two_ranks", lambda: Verdict("ranks", "ok", ""))
    assert doctor.main(["--short", "--json"]) == int("loopback" in planted or "torch_error" in planted)  # no warning
    verdicts = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(verdicts) == told and set(verdicts["torch"]) == {"name", "state", "found", "cure"}


def test_two_ranks_are_started():
    assert doctor.start_two_ranks().found == "two have started, and each has the sum of 1 and 2: [3, 3]"


@pytest.mark.parametrize(
    "argv", ["--world-size 2", "--rendezvous h:1", "--world-size 1 --rendezvous h:1", "--timeout 0", "--timeout x"]
)
def test_options_that_make_no_sense_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        doctor.main(argv.split())
    assert refused.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_meeting_without_torch_is_refused_with_what_to_run_instead(monkeypatch, capsys):
    from ddp_course import diagnose

    monkeypatch.delattr(diagnose, "reachability", raising=False)
    monkeypatch.setitem(sys.modules, "ddp_course.diagnose.reachability", None)  # importing it raises ImportError
    assert doctor.main(["--world-size", "2", "--rendezvous", "127.0.0.1:29500"]) == 1
    assert "run the doctor without --rendezvous" in capsys.readouterr().err


def test_the_table_puts_the_cure_below_what_it_cures_and_folds_long_lines():
    found = "vm is 127.0.0.1: enough for one machine; before you use several: export GLOO_SOCKET_IFNAME=eth0, or " * 2
    lines = table([Verdict("host name", "problem", found.strip(), "fix /etc/hosts")]).splitlines()
    assert max(map(len, lines)) <= 100 and lines[1].startswith(" " * 26)
    assert lines[-3] == f"{'':25} -> fix /etc/hosts" and lines[-1] == "1 checks: 1 problems, 0 warnings"
    assert " ".join(" ".join(lines[:-3]).split()) == f"PROBLEM host name {found.strip()}"


@pytest.mark.slow
@pytest.mark.alone
def test_this_machine_can_run_the_course_and_a_broken_torch_does_not_stop_the_doctor():
    # In this process torch cannot be imported; the processes that the doctor starts can.
    program = (
        "import sys; sys.modules['torch'] = None; from ddp_course.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    states = {told["name"]: told["state"] for told in json.loads(done.stdout)}
    assert (done.returncode, states["torch"], states["gloo"], states["loopback"]) == (0, "ok", "ok", "ok"), done
