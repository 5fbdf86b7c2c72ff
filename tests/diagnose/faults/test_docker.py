"""The guided check of a container, on planted facts, and once on the facts of this machine."""

from dataclasses import replace

import pytest

from ddp_course.diagnose.faults.docker import CONTAINER, ContainerFacts, check_container, judge, look_around

MB = 2**20


def test_all_is_well_by_default():
    assert check_container(ContainerFacts()) == [] and judge(ContainerFacts()).fault is None


def test_the_three_troubles_come_in_order_each_with_its_cure():
    shm, p2p, interfaces = check_container(CONTAINER)
    assert "64 MB for 4 GPUs" in shm.found and "--shm-size" in shm.cure
    assert "arrives wrong" in p2p.found and "NCCL_P2P_DISABLE=1" in p2p.cure
    assert "br-4f2a" in interfaces.found and "NCCL_SOCKET_IFNAME=eth0" in interfaces.cure


@pytest.mark.parametrize(
    "changed, troubles",
    [
        ({"gpus": 1, "machines": 1}, 0),  # one GPU talks to nobody
        ({"shm_bytes": 65 * MB}, 2),
        ({"shm_bytes": None}, 3),
        ({"p2p": "none"}, 2),  # NCCL sees that itself
        ({"machines": 1}, 2),  # interfaces do not matter on one machine
        ({"interfaces": ("lo", "docker0", "eth0")}, 2),  # NCCL passes over docker0 by itself
        ({"interfaces": ("lo",)}, 3),
        ({"environ": {"NCCL_SOCKET_IFNAME": "eth"}}, 2),
        ({"environ": {"NCCL_SOCKET_IFNAME": "ib0"}}, 3),
        ({"environ": {"NCCL_SOCKET_IFNAME": "lo"}}, 3),
    ],
)
def test_each_fact_counts(changed, troubles):
    assert len(check_container(replace(CONTAINER, **changed))) == troubles


def test_this_machine_can_be_looked_at():
    facts = look_around(machines=2)
    assert facts.machines == 2 and facts.p2p in ("right", "wrong", "none")
    assert all(isinstance(advice.cure, str) for advice in check_container(facts))
