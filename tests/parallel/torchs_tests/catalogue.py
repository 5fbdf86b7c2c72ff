"""Which of torch's tests are about DDP, which of them do we run, and why not the rest?

The names are read from the file in the installed torch, without importing it. Each is in exactly one of three tables:
RUN, on torch's DDP and on ours; NOT_OURS, on torch's alone; NOT_HERE, on neither. In a table the names stand under
their reason. A torch that has other tests than MADE_FOR is no mistake: what is new is run and reported.

Read next: `shim.py`, how they are run; `test_torchs_tests.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

MADE_FOR = "2.15"
MODULE = "torch.testing._internal.distributed.distributed_test"
SUBJECT = re.compile(r"DDP|ddp|DistributedDataParallel|SyncBatchNorm|DistributedSampler")

RUN = {
    "": """
        test_DistributedDataParallelCPU
        test_DistributedDataParallelCPU_grad_is_view
        test_DistributedDataParallel_SyncBatchNorm
        test_DistributedDataParallel_SyncBatchNorm_2D_Input
        test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        test_DistributedDataParallel_SyncBatchNorm_half
        test_DistributedDataParallel_non_default_stream
        test_DistributedDataParallel_with_amp_and_grad_is_view
        test_DistributedSampler_padding
        test_SyncBatchNorm_process_group
        test_accumulate_gradients_no_sync
        test_accumulate_gradients_no_sync_allreduce_hook
        test_accumulate_gradients_no_sync_allreduce_with_then_hook
        test_accumulate_gradients_no_sync_grad_is_view
        test_compute_bucket_assignment_by_size_sparse_error_without_logger
        test_ddp_broadcast_buffer
        test_ddp_create_graph
        test_ddp_forward_backward_hook
        test_ddp_hook_parity_allreduce
        test_ddp_hook_parity_allreduce_process_group
        test_ddp_hook_parity_post_localSGD
        test_ddp_hook_parity_powerSGD
        test_ddp_hook_pickling_powerSGD
        test_ddp_inference
        test_ddp_init_sync_buffers_with_forward_sync_buffers_false
        test_ddp_model_diff_num_params_across_ranks
        test_ddp_model_diff_shape_across_ranks
        test_ddp_namedtuple
        test_ddp_new_tensor_in_fwd
        test_ddp_sync_bn_training_vs_eval
        test_ddp_zero_output_features
        test_grads_same_across_ranks_with_no_sync
        test_output_unused_in_loss_dict_module
        test_output_unused_in_loss_tuple_module
        test_post_localSGD_optimizer_parity
        test_post_localSGD_optimizer_parity_grad_is_view
        test_post_localSGD_optimizer_parity_with_hierarchical_sgd
        test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
        test_post_localSGD_optimizer_step_reload
        test_stateless_api_with_ddp
        test_undefined_grad_parity_unused_parameters
        test_verify_model_across_rank_without_logger
    """,
    "static_graph=True is read as find_unused_parameters=True": """
        test_ddp_compile_static_graph
        test_ddp_new_tensor_in_fwd_static_graph
        test_ddp_returns_tensor_with_no_grad
        test_ddp_shared_grad_acc_unused_params
        test_ddp_static_graph_nested_types
        test_static_graph_multi_forward
    """,
}

NOT_OURS = {
    "ours has no join": """
        test_ddp_grad_div_uneven_inputs
        test_ddp_join_model_equivalence
        test_ddp_join_respects_forward_sync_buffers_false
        test_ddp_uneven_input_exception
        test_ddp_uneven_input_join_disable
        test_ddp_uneven_inputs_stop_iteration_sync_bn
    """,
    "reads torch's private log (_get_ddp_logging_data)": """
        test_ddp_comm_hook_logging
        test_ddp_logging_data_cpu
        test_ddp_python_error_logged
        test_different_graph_across_ranks
    """,
    "reads torch's private reducer or log, and compares torch's words": """
        test_ddp_control_flow_different_across_ranks
        test_ddp_control_flow_same_across_ranks
        test_ddp_unused_params_rebuild_buckets_exception
        test_detect_ddp_is_actually_static
        test_invalid_static_graph
    """,
    "compares torch's words: the numbers of the parameters; ours gives their names": """
        test_ddp_multiple_nested_unused_params_error
    """,
    "parameters to ignore: torch's private _set_params_and_buffers_to_ignore_for_model": """
        test_ddp_build_debug_param_to_name_mapping
        test_ddp_ignore_params_arg
        test_ddp_multiple_nested_unused_params_err_ignore_params
        test_get_data_parallel_params
    """,
    "another private method or attribute of torch's DDP": """
        test_compute_bucket_assignment_by_size_sparse_error_with_logger
        test_ddp_broadcast_buffer_via_hook
        test_ddp_buffer_hook_allreduce
        test_ddp_buffer_hook_allreduce_return_future
        test_ddp_build_debug_param_to_name_mapping_requires_grad
        test_ddp_remove_autograd_hooks
        test_ddp_sink_noclone
        test_ddp_sync_module_states
        test_static_graph_api_cpu
    """,
    "would pass for the wrong reason: it takes the missing private logger for the error that it expects": """
        test_verify_model_across_rank_with_logger
    """,
    "an option that ours does not have": """
        test_ddp_bucket_cap_mb_list
        test_ddp_device_mesh_initialization
        test_skip_all_reduce_unused_parameters
    """,
    "asks for the profiler event search_unused_parameters": """
        test_ddp_profiling_autograd_profiler
        test_ddp_profiling_torch_profiler
    """,
    "broadcast_buffers is deprecated in torch's DDP, not in ours": """
        test_ddp_broadcast_buffers_deprecation_warning
    """,
    "with nothing to train ours raises a ValueError, torch's DDP a RuntimeError": """
        test_DistributedDataParallel_requires_grad
    """,
    "calls a function of torch's; no DDP is built": """
        test_dump_DDP_relevant_env_vars
    """,
}

NOT_HERE = {
    "streams of a GPU, inside torch's DDP itself": """
        test_ddp_apply_optim_in_backward
        test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
        test_ddp_apply_optim_in_backward_ignored_params
        test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
        test_ddp_native_mixed_precision_ignored_params
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
    """,
    "asks for the number of a tensor's GPU": """
        test_ddp_device
        test_ddp_logging_data_gpu
    """,
    "about the trace of NCCL": """
        test_ddp_profiling_execution_trace
    """,
    "asks torch's log whether there is a SyncBatchNorm of torch's, which refuses the CPU": """
        test_sync_bn_logged
    """,
    "torch's DDP fails it: reloaded in the middle of training, it has lost the gradients that it adds up": """
        test_DistributedDataParallel
    """,
    "torch's DDP fails it, and torch skips it": """
        test_ddp_has_finalized
    """,
    "ours has no join; torch's DDP runs into the time limit of a collective on a busy machine": """
        test_ddp_uneven_inputs
    """,
}

SLOW = {
    "test_DistributedDataParallel_non_default_stream": "a thousand steps",
    "test_ddp_compile_static_graph": "compiles",
    "test_ddp_model_diff_shape_across_ranks": "torch's DDP waits for a limit of 10 s; ours says so at once",
}


def by_name(table: dict[str, str]) -> dict[str, str]:
    """Return the reason of each name in a table."""
    return {name: reason for reason, names in table.items() for name in names.split()}


def in_installed_torch() -> list[str]:
    """Return the names of torch's tests that speak of our subject, themselves or in a helper that they call."""
    text = Path(importlib.util.find_spec(MODULE).origin).read_text(encoding="utf-8")
    outer = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "DistributedTest")
    base = next(node for node in outer.body if getattr(node, "name", "") == "_DistTestBase")
    lines = text.splitlines()
    source = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in base.body
        if isinstance(node, ast.FunctionDef)
    }

    calls = {name: set(re.findall(r"self\.(\w+)\(", code)) & source.keys() for name, code in source.items()}
    found = {name for name, code in source.items() if SUBJECT.search(code)}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return [name for name in source if name.startswith("test_") and name in found]
