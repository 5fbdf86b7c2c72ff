"""What is checked on this machine, and in which order?

`gather_facts` looks around, and each check turns facts into a verdict. The standard library alone is enough.
Read next: `facts.py`, then `checks.py`; `commands/doctor.py` tells the verdicts.
"""

from __future__ import annotations

from ddp_course.diagnose import checks, cluster_checks
from ddp_course.diagnose.facts import Facts
from ddp_course.diagnose.verdict import Verdict

# In the order in which a person would fix things.
CHECKS = (
    checks.check_python,
    checks.check_torch,
    checks.check_torchvision,
    checks.check_gpus,
    checks.check_cuda,
    checks.check_nccl,
    cluster_checks.check_links,
    checks.check_gloo,
    checks.check_loopback,
    cluster_checks.check_interfaces,
    cluster_checks.check_host_name,
    cluster_checks.check_ports,
    checks.check_shared_memory,
    checks.check_cores,
    checks.check_threads,
    checks.check_temp,
    cluster_checks.check_checkpoints,
    checks.check_kernel,
    cluster_checks.check_environment,
)


def diagnose(facts: Facts) -> list[Verdict]:
    """Return one verdict for each check."""
    return [check(facts) for check in CHECKS]
