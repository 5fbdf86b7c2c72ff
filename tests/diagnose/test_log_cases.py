"""Logs as they are found outside, shortened: what each died of, and whom it accuses; above all, whom it does not.

Written after public reports, and in their formats; the folder `logs` has seven at length.
"""
# ruff: noqa: E501  (a log stays a line)

from pathlib import Path

import pytest

from ddp_course.diagnose.logs import read

# --- What launchers and ranks write ----------------------------------------------------------------

TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
{others}
------------------------------------------------------------
Root Cause (first observed failure):
{root}
============================================================
"""
NO_OTHER = "  <NO_OTHER_FAILURES>"
ELSEWHERE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def table(root: str, others: str = NO_OTHER) -> str:
    """torchrun's last words."""
    return TABLE.format(root=root, others=others)


def end(rank: int, code: int, pid: int = 100, said: str = ELSEWHERE) -> str:
    """One process in them."""
    return (
        f"[{rank}]:\n  time      : 2025-03-01_12:00:02\n  host      : n1\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid})\n  error_file: <N/A>\n  traceback : {said}"
    )


def gave_up(rank: int, seq: int, op: str, elements: int, group: str = "") -> str:
    """NCCL's watchdog."""
    return (
        f"[rank{rank}]:[E1123 10:00:0{rank}.1 ProcessGroupNCCL.cpp:632] [{group}Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for "
        "600013 milliseconds before timing out.\n"
    )


def gave_up_2(rank: int) -> str:
    """What torch 2.15's NCCL backend says."""
    return (
        f"[rank={rank}] Operation timed out after 600794 ms\n"
        f"[rank={rank}] Aborting process on rank {rank} due to timeout - timeout watchdog detected operation timeout\n"
    )


def counts(rank: int, seq: int, last: int) -> str:
    """What it says next."""
    return (
        f"[rank{rank}]:[E1123 10:00:0{rank}.2 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure "
        f"detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {last}, last completed work: {seq - 1}\n"
    )


def told_by_another(rank: int, last: int) -> str:
    """What a rank says that has not timed out itself."""
    return (
        f"[rank{rank}]:[E703 21:51:54.11 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump "
        "signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL "
        f"work: {last}, last completed NCCL work: {last}.This is most likely caused by incorrect usages of collectives\n"
    )


def traceback(error: str, before: str = "") -> str:
    """Python's; `before` stands before each line."""
    lines = (
        "Traceback (most recent call last):",
        '  File "/d/train.py", line 9, in main',
        "    loss = model(x)",
        error,
    )
    return "".join(f"{before}{line}\n" for line in lines)


# Name -> files, and what must be read from them: cause and rank.
JOBS = {
    "nccl2, one absent": ({"j.log": "".join(gave_up_2(rank) for rank in (0, 1, 3))}, ("hang", 2)),
    "nccl2, all there": ({f"rank{rank}.log": gave_up_2(rank) for rank in range(4)}, ("hang", None)),
    "dump-signal absent": ({"j.log":gave_up(0,5,"ALLREDUCE",9)+gave_up(1,5,"ALLREDUCE",9)+told_by_another(2, 4)+gave_up(3,5,"ALLREDUCE",9)},("hang",2)),
    "all entered": ({"j.log":"".join(gave_up(r,5,"ALLREDUCE",9)+counts(r, 5, 5) for r in range(4))},("hang",None)),
    "tp groups": ({"j.log":gave_up(0,50,"ALLREDUCE",9,"PG ID 1 PG GUID 3(tp) ")+gave_up(1,50,"ALLREDUCE",9,"PG ID 1 PG GUID 3(tp) ")+gave_up(2,50,"ALLGATHER",7,"PG ID 1 PG GUID 5(tp) ").replace("Rank 2]","Rank 0]")+gave_up(3,50,"ALLGATHER",7,"PG ID 1 PG GUID 5(tp) ").replace("Rank 3]","Rank 1]")},("hang",None)),
    "torch1.x": ({"j.log":"[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1808226 milliseconds before timing out.\n[E ProcessGroupNCCL.cpp:828] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1808226 milliseconds before timing out.\n[E ProcessGroupNCCL.cpp:828] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1808226 milliseconds before timing out.\n"+traceback("RuntimeError: NCCL communicator was aborted on rank 3.  Original reason for failure was: [Rank 3] Watchdog caught collective operation timeout")},("hang",0)),
    "worker exc": ({"j.log":traceback("KeyError: Caught KeyError in DataLoader worker process 3.", "[rank1]: ")+"[rank1]: Original Traceback (most recent call last):\n[rank1]:   File \"d.py\", line 3, in __getitem__\n[rank1]: KeyError: 'label'\n\n[rank0]: torch.distributed.DistBackendError: NCCL error in: x\n"},("KeyError: 'label'",1)),
    "echo root table": ({"j.log":traceback("RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [10.0.0.3]:1", "[rank0]: ")+traceback("ValueError: bad row", "[rank2]: ")+table(end(0, 1), end(2, 1))},("ValueError: bad row",2)),
    "echo root unprefixed": ({"j.log":traceback("RuntimeError: [../gloo/pair.cc:598] Connection closed by peer [10.0.0.3]:1")+traceback("ValueError: bad row")+table(end(0, 1), end(2, 1))},("ValueError: bad row",None)),
    "root only": ({"j.log":traceback("ValueError: bad row")+table(end(3, 1))},("ValueError: bad row",3)),
    "record": ({"j.log":table(end(3, 1, said="Traceback (most recent call last):\n    File \"t.py\", line 3, in main\n  ZeroDivisionError: division by zero"))},("ZeroDivisionError: division by zero",3)),
    "sigkill not root": ({"j.log":traceback("RuntimeError: Connection reset by peer", "[rank0]: ")+table(end(0, 1), end(2, -9))},("killed",2)),
    "sigkill root": ({"j.log":table(end(2, -9), end(0, -15))},("killed",2)),
    "oom kernel": ({"j.log":table(end(2, -9, 4711), end(0, -15, 99)),"dmesg.txt":"[12.3] Out of memory: Killed process 4711 (python) total-vm:1kB\n"},("out-of-memory",2)),
    "caught oom healthy": ({"j.log":"step 1 loss 2.3\nWARNING: caught RuntimeError: CUDA out of memory, halving the batch\nstep 2 loss 2.1\nstep 3 loss 2.0\nstep 4 loss 1.9\nstep 5 loss 1.8\nTraining finished\n"},(None,None)),
    "scary healthy": ({"j.log":"""W1123 10:00:00.000 1 torch/distributed/run.py:766] *****************************************
W1123 Setting OMP_NUM_THREADS environment variable for each process to be 1
[W1123 10:00:01.0 socket.cpp:755] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - Cannot assign requested address).
[W1123 10:00:01.0 socket.cpp:697] [c10d] The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).
[rank0]:[W1123 10:00:02.0 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.
[rank0]:[W1123 reducer.cpp:1400] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters
epoch 0 loss 1.0
Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
epoch 1 loss 0.9
UserWarning: resource_tracker: There appear to be 6 leaked semaphore objects to clean up at shutdown
[rank0]:[W1123 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.
saved checkpoint to /x/y.pt
Training complete
[rank1]:[W1123 10:10:02.0 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3, addr=[localhost]:3, remote=[localhost]:29500): failed to recv, got 0 bytes
"""},(None,None)),
    "scary healthy no finish": ({"j.log":"[W1123 10:00:01.0 socket.cpp:697] [c10d] The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).\nImportError: flash_attn not installed, falling back\nstep 1 loss 3.0\nstep 2 loss 3.0\nstep 3 loss 2\nstep 4 loss 1\n"},(None,None)),
    "stops": ({"j.log":"step 1 loss 3.0\nstep 2 loss 3.0\n"},(None,None)),
    "nan guard": ({"j.log":"[rank2]: step 4 loss nan\n"+traceback("FloatingPointError: loss is nan at step 4", "[rank2]: ")},("not-a-number",2)),
    "nan grows": ({"j.log":"step 1 loss 3.0\nstep 2 loss nan\nstep 3 loss nan\ndone\n"},("not-a-number",None)),
    "sigterm": ({"j.log":"W1123 10:00:00.0 1 torch/distributed/elastic/agent/server/api.py:704] Received Signals.SIGTERM death signal, shutting down workers\nW1123 Sending process 85 closing signal SIGTERM\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 84 got signal: 15\n"},("terminated",None)),
    "store gone": ({f"rank{r}.log":"[W1123 10:10:02.0 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3, addr=[n1]:3, remote=[n0]:29500): Broken pipe\n" for r in (1,2,3)}|{"rank0.log":"step 4\n"},("store-gone",0)),
    "emfile": ({"j.log":traceback("OSError: [Errno 24] Too many open files: '/d/x.bin'", "[rank1]: ")},("file-descriptors",1)),
    "xid": ({"kern.log":"Nov 12 04:00:00 node17 kernel: NVRM: Xid (PCI:0000:17:00): 79, pid=4711, GPU has fallen off the bus.\n","j.log":traceback("RuntimeError: CUDA error: unspecified launch failure", "[rank5]: ")},("gpu-failed",None)),
    "illegal": ({"j.log":"[rank1]:[E1123 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n[rank0]:[E1123 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 0] NCCL error: remote process exited or there was a network error\n"},("illegal-memory-access",1)),
    "device assert": ({"j.log":"../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"+traceback("RuntimeError: CUDA error: device-side assert triggered", "[rank3]: ")},("device-assert",3)),
    "clients": ({"j.log":traceback("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.", "[rank0]: ")},("world-size",None)),
    "nfs": ({"j.log":traceback("OSError: [Errno 116] Stale file handle: '/nfs/x.pt'", "[rank6]: ")},("file-system",6)),
    "import one node": ({"j.log":traceback("ModuleNotFoundError: No module named 'einops'", "[rank9]: ")},("import-error",9)),
    "same on all": ({"j.log":"".join(traceback("FileNotFoundError: [Errno 2] No such file or directory: '/d/x'", f"[rank{r}]: ") for r in range(4))+table(end(0, 1), end(1, 1))},("FileNotFoundError: [Errno 2] No such file or directory: '/d/x'",None)),
    "all oom": ({"j.log":"".join(traceback("torch.OutOfMemoryError: CUDA out of memory. Tried", f"[rank{r}]: ") for r in range(4))},("gpu-out-of-memory",None)),
    "skewed": ({"rank0.log":"2026-11-23 04:00:01 RuntimeError: Connection closed by peer\n","rank1.log":"2026-11-23 04:00:09 ValueError: bad\n"},("ValueError: bad",1)),
    "worker pods": ({"job-worker-0.log":traceback("RuntimeError: CUDA out of memory"),"job-master-0.log":"step 1\n"},("gpu-out-of-memory",None)),
    "multi node failed line": ({"j.log":"+ torchrun --nnodes 2 --nproc-per-node 8\nE1123 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 2) of binary: /p\n"},("killed",None)),
    "srun killed": ({"slurm-1.out":"0: step 4\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\nsrun: error: gpu7: task 5: Out Of Memory\n"},("out-of-memory",5)),
    "monitored two": ({"j.log":"[rank0]: RuntimeError: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms\n"},("hang",None)),
    "desync": ({"j.log":"[rank0]: - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n   - [47] joined but didn't finish collective #41207 (count from 1)\n     [3] finished collective #41207, but didn't join collective #41208 (count from 1)\n"},("hang",3)),
    "argparse": ({"j.log":"usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --epohcs 3\n"},("arguments",None)),
    "chain echo": ({"j.log":traceback("torch.distributed.DistBackendError: NCCL error in: x", "[rank0]: ")+"[rank0]: \n[rank0]: The above exception was the direct cause of the following exception:\n[rank0]: \n"+traceback("TrainingError: step failed", "[rank0]: ")},(None,None)),
    "spawn": ({"j.log":"torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File \"t.py\"\nValueError: no rows\n"},("ValueError: no rows",1)),
    "spawn killed": ({"j.log":"torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL\n"},("killed",2)),
    "k8s": ({"pod.txt":"State: Terminated\n  Reason: Error\n  Exit Code: 137\n"},("killed",None)),
    "gloo silent hole": ({"j.log":"".join(f"[rank{r}]: RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete\n" for r in (0,1,3))},("hang",2)),
    "torchrun default prefix": ({"j.log":"[default1]:Traceback (most recent call last):\n[default1]:  File \"t.py\", line 4\n[default1]:ValueError: odd\n[default0]:RuntimeError: Connection closed by peer\n"},("ValueError: odd",1)),
    "compose": ({"j.log":"trainer-1  | ValueError: odd\n"},("ValueError: odd",None)),
    "quota": ({"j.log":traceback("OSError: [Errno 122] Disk quota exceeded: '/s/x.pt'", "[rank0]: ")},("disk-full",0)),
    "http retries": ({"j.log":"requests: Read timed out. (read timeout=10), retrying\nstep 1 loss 1\n"},(None,None)),
    "interface": ({"j.log":traceback("RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth0", "[rank0]: ")},("no-interface",0)),
    "sigint": ({"j.log":"step 3\nTraceback (most recent call last):\n  File x\nKeyboardInterrupt\n"},("interrupted",None)),
    "the course's report": ({"j.log": '[rank0]: ddp-course: {"code": "absent", "rank": 2, "op": "all_reduce", "number": 3}\n' + gave_up(0, 3, "ALLREDUCE", 9)}, ("skipped-collective", 2)),
    "the course's report of a store": ({"j.log": 'ddp-course: {"code": "store", "rank": 1, "line": "train.py:41"}\n'}, ("store", 1)),
    "the course's report, of a rank's error": ({"j.log": traceback("KeyError: 'label'") + 'ddp-course: {"code": "raised", "rank": 1, "error": "KeyError"}\n'}, ("KeyError: 'label'", 1)),
    "the course's report, caught": ({"j.log": 'step 1\nddp-course: {"code": "absent", "rank": 2, "op": "all_reduce", "number": 3}\nstep 2\nstep 3\nstep 4\nstep 5\ndone\n'}, (None, None)),
    "restart": ({"j.log":traceback("ValueError: flaky", "[rank1]: ")+"step 1 loss 1\n[rank1]: step 2 loss 1\n[rank1]: step 3\nTraining finished\n"},(None,None)),
    "preempt config": ({"j.log":"preemption handler installed\nnode failure policy: restart\nerror_if_nonfinite=False\nstep 1 loss 2\n"},(None,None)),
    "detail": ({"j.log":"".join(f"[rank{r}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {r} is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[10], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda)), but Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=BROADCAST, TensorShape=[7], TensorDtypes=Float).\n" for r in (0,1,3))},("mismatched-calls",2)),
    "fewer": ({"j.log":"".join(f"[rank{r}]: RuntimeError: Timed out initializing process group in store based barrier on rank: {r}, for key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)\n" for r in (0,1,3))},("world-size",2)),
    "srun bad exit": ({"s.out":"3: Traceback (most recent call last):\n3:   File x\n3: ValueError: odd\nsrun: error: n2: task 3: Exited with exit code 1\nslurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-11-23T04:00:00 ***\n"},("ValueError: odd",3)),
    "srun bad exit, silent": ({"s.out":"0: step 3\nsrun: error: n2: task 3: Exited with exit code 1\nslurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-11-23T04:00:00 ***\n"},("exit status 1",3)),
    "scancel": ({"s.out":"step 3 loss 2\nslurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-23T04:00:00 ***\n"},("cancelled",None)),
    "ray": ({"r.log":"(RayTrainWorker pid=12, ip=10.0.0.2) Traceback (most recent call last):\n(RayTrainWorker pid=12, ip=10.0.0.2) ValueError: odd\n"},("ValueError: odd",None)),
    "loguru": ({"r.log":"2026-01-01 10:00:00.123 | ERROR    | __main__:main:42 - ValueError: odd\n"},("ValueError: odd",None)),
    "ignored": ({"r.log":"Training finished\nException ignored in: <function Pool.__del__ at 0x7>\nTraceback (most recent call last):\n  File x\nTypeError: 'NoneType' object is not callable\n"},(None,None)),
    "healthy rank files": ({"rank0.log":"step 1 loss 1\nstep 2 loss 1\nTraining finished\n"}|{f"rank{r}.log":"[W1123 10:00:01.0 socket.cpp:697] [c10d] The IPv6 network addresses of (n0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).\nstep 1\n[W1123 10:10:02.0 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer\n" for r in (1,2)},(None,None)),
    "rank0 done others hang": ({"j.log":"[rank0]: epoch 3 loss 1\n[rank0]: training finished\n[rank1]: RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete\n[rank2]: RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete\n"},("hang",0)),
    "one barrier": ({"j.log":gave_up(0,7,"ALLREDUCE",1)+"".join(gave_up(r,7,"ALLREDUCE",900) for r in (1,2,3))},("mismatched-calls",0)),
    "out of step": ({"j.log":gave_up(0,101,"ALLREDUCE",1)+"".join(gave_up(r,100,"BROADCAST",900) for r in (1,2,3))},("hang",None)),
    "segv": ({"j.log":"[rank2]: Fatal Python error: Segmentation fault\n"},("crashed",2)),
    "oom and timeouts": ({"j.log":traceback("torch.OutOfMemoryError: CUDA out of memory. Tried", "[rank2]: ")+gave_up(0,5,"ALLREDUCE",9)+gave_up(1,5,"ALLREDUCE",9)},("gpu-out-of-memory",2)),
    "two errors contradict": ({"j.log":traceback("ValueError: a", "[rank2]: ")+traceback("KeyError: 'b'", "[rank0]: ")+table(end(0, 1), end(2, 1))},("ValueError: a",None)),
    "preempt slurm": ({"s.out":"step 3 loss 2\nslurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-23T04:00:00 DUE TO PREEMPTION ***\n"},("preempted",None)),
    "store waits id": ({"j.log":"".join(f"[rank{r}]: torch.distributed.DistBackendError: [{r}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0\n" for r in (1,2,3))},("hang",0)),
    "mpirun": ({"j.log":"[1,0]<stderr>:step 1\n[1,3]<stderr>:Traceback (most recent call last):\n[1,3]<stderr>:  File x\n[1,3]<stderr>:IndexError: list index out of range\n"},("IndexError: list index out of range",3)),
    "json": ({"j.log":'{"ts": "x", "rank": 3, "level": "ERROR", "msg": "CUDA out of memory. Tried to allocate"}\n{"ts":"x", "rank": 0, "msg":"Connection closed by peer"}\n'},("gpu-out-of-memory",3)),
    "rotated": ({"train.log.1":traceback("ValueError: odd"),"train.log.2":"step 1\n"},("ValueError: odd",None)),
    "connect refused": ({"j.log":"[rank3]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (n0, 29500).\n"},("rendezvous-unreachable",None)),
    "lightning": ({"j.log":"`Trainer.fit` stopped: `max_epochs=3` reached.\n"},(None,None)),
    "stuck": ({"j.log":"[rank2]:[E419 10:53:25.4 ProcessGroupNCCL.cpp:1484] [PG ID 2 PG GUID 9 Rank 2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"},("hang",None)),
    "recv": ({"j.log":gave_up(1,3313,"RECV",18)},("hang",None)),
    "ready twice all": ({"j.log":"".join(traceback("RuntimeError: Expected to mark a variable ready only once. This error is caused by", f"[rank{r}]: ") for r in (0,1))},("marked-ready-twice",None)),
    "sigterm other node": ({"n0.log":traceback("ValueError: odd", "[rank3]: "),"n1.log":"W1123 Received Signals.SIGTERM death signal, shutting down workers\n"},("ValueError: odd",3)),
    "oom no rank torchrun default": ({"j.log":"[default3]:torch.OutOfMemoryError: CUDA out of memory. Tried\n+ --nnodes=4\n"},("gpu-out-of-memory",None)),
    "node fail": ({"s.out":"step 4\nsrun: error: Node failure on n12\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"},("node-failed",None)),
    "empty rank": ({"rank0.log":"step 4\nRuntimeError: Connection closed by peer\n","rank1.log":"step 4\n"},("connection-closed",1)),
    "printed exc": ({"j.log":"step 1 loss 2\nTraceback (most recent call last):\n  File x\nRuntimeError: bad jpeg\nskipped one sample\n[rank0]: step 2 loss 2\n[rank0]: step 3 loss 1\n[rank0]: step 4 loss 1\n[rank0]: step 5 loss 1\n"},(None,None)),
}  # fmt: skip

# The folder's name, the cause and the rank, and words that must be said.
AT_LENGTH = {
    "L1_mismatch": ("mismatched-calls", None, ["ranks 5 and 7 in BROADCAST of 5056", "0, 1, 2, 3, 4 and 6 in ALLREDUCE of 2106881", "80078"]),
    "M2": ("mismatched-calls", None, ["rank 0 in ALLREDUCE of 100 elements; rank 1 in ALLREDUCE of 60 elements", "different sizes"]),
    "L3_sighup": ("hang-up", None, ["SIGHUP", "setsid, nohup, tmux"]),
    "L5_shm": ("shared-memory", None, ["/dev/shm", "not the disk"]),
    "L11_rank0_away": ("hang", 0, ["nothing is heard from rank 0", "rank 0 never entered"]),
    "L15_ib": ("infiniband", None, ["10.216.210.236", "the peer named in the line", "link"]),
    "L16_store_barrier": ("stale-rendezvous", None, ["world_size=2, worker_count=4", "another world size", "file of an earlier job"]),
}  # fmt: skip


def written(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_the_cause_is_found_and_nobody_is_accused_falsely(name, tmp_path):
    files, expected = JOBS[name]
    found = read([written(files, tmp_path)])
    assert (found.cause, found.rank) == expected, found


@pytest.mark.parametrize("name", AT_LENGTH)
def test_logs_at_length(name):
    cause, rank, words = AT_LENGTH[name]
    found = read([Path(__file__).parent / "logs" / name])
    assert (found.cause, found.rank) == (cause, rank)
    said = f"{found.evidence}\n{found.cure}"
    assert [word for word in words if word not in said] == []


def test_a_good_end_is_told_from_a_log_that_stops(tmp_path):
    stopped, ended = (read([written(JOBS[name][0], tmp_path)]).evidence for name in ("stops", "scary healthy"))
    assert "nor a good end" in stopped and "step 2 loss 3.0" in stopped
    assert "the job finished, and nothing shows a failure" in ended


def test_quotations_end_between_words_and_hold_what_decided(tmp_path):
    long = "word " * 100
    found = read([written({"a.log": f"{long}CUDA out of memory. Tried {long}"}, tmp_path)])
    quoted = found.evidence.partition("1: ")[2]
    assert len(quoted) <= 160 and "CUDA out of memory" in quoted
    assert quoted.startswith("… CUDA out") and quoted.endswith(" word …")


def test_advice_fits_what_is_known(tmp_path):
    for files, (_, rank) in JOBS.values():
        for old in tmp_path.iterdir():
            old.unlink()
        found = read([written(files, tmp_path)])
        assert rank is not None or "this rank" not in found.cure and "that rank;" not in found.cure, found
