"""The tests nearest to each module: by its name, then by this table, then by its package."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]

# Modules that have no test file of their name, or whose name alone does not say where their behaviour is tested.
NEAR = {
    "backends": "test_stages runtime/cuda/test_half_weights runtime/cuda/test_half_gradients runtime/inductor/test_backend",
    "compiled": "test_stages test_step runtime/cuda/test_graph_capture test_mistakes runtime/test_carried",
    "passes": "test_stages transforms/test_neighbours",
    "stages": "test_stages test_step test_fitting",
    "ops.all_gather": "ops/test_contracts ops/test_launches ops/interpreted/test_collectives",
    "ops.barrier": "ops/test_contracts runtime/cuda/test_copied_messages runtime/cuda/test_symmetric ops/interpreted/test_collectives",
    "ops.cast_pack": "ops/test_contracts ops/test_launches ops/interpreted/test_moves",
    "ops.fused_adamw": "ops/test_fused_adamw ops/test_contracts ops/interpreted/test_updates",
    "ops.kernel": "ops/test_launches ops/test_contracts ops/interpreted/test_moves",
    "ops.marks": "tracing/test_gradient_marks tracing/test_import_fx ops/test_contracts",
    "ops.move": "ops/test_contracts ops/test_launches ops/interpreted/test_moves",
    "ops.operation": "ops/test_contracts",
    "ops.reduce": "ops/test_contracts ops/interpreted/test_collectives",
    "ops.reduce_scatter": "ops/test_contracts ops/test_launches ops/interpreted/test_collectives",
    "ops.sum_terms": "ops/test_contracts ops/test_launches ops/interpreted/test_sum_terms",
    "ops.symmetric": "runtime/cuda/test_symmetric ops/test_contracts",
    "ops.tables": "ops/test_contracts ops/test_launches ops/interpreted/test_moves",
    "ops.unpack": "ops/test_contracts ops/test_launches ops/interpreted/test_moves",
    "calling.errors": "test_errors calling/test_guard calling/test_call",
    "calling.global_state": "calling/test_purity tracing/test_fx_trace calling/test_guard",
    "calling.host_memory": "transforms/test_offload calling/test_guard",
    "calling.inputs": "calling/test_guard calling/test_call test_mistakes test_errors",
    "calling.meta_leaves": "lift/test_optimizer_state test_mistakes lift/test_lift",
    "calling.leaf_records": "calling/test_guard runtime/test_carried runtime/test_failure",
    "rewrites.across_steps": "transforms/test_across_steps runtime/test_carried",
    "ir.axes": "transforms/test_axes transforms/test_leaf_axes ir/test_printer",
    "ir.cached_analysis": "ir/test_graph ir/test_structure",
    "rewrites.carried_copies": "runtime/cuda/test_carried_copies transforms/test_offload_across_steps",
    "rewrites.cheap_values": "transforms/test_remat transforms/test_remat_memory",
    "ir.dependencies": "ir/test_graph planning/test_skeleton transforms/test_delay_weight_grads",
    "ir.differences": "ir/test_printer ir/test_graph transforms/test_prefetch",
    "rewrites.flex_attention": "tracing/test_higher_order runtime/test_flex_attention",
    "ir.higher_order": "tracing/test_higher_order planning/test_flops",
    "ir.layout": "transforms/test_dims runtime/test_sent_terms transforms/test_axes laws/test_empty_parts",
    "ir.liveness": "planning/test_cost ir/test_collectives ir/test_donation",
    "ir.marks": "ir/test_graph ir/test_collectives transforms/test_shard_params",
    "ir.micro_batches": "transforms/test_accumulate laws/test_micro_batches transforms/test_reduce_once",
    "rewrites.neighbours": "transforms/test_neighbours planning/test_parts",
    "ir.nested": "tracing/test_higher_order ir/test_printer",
    "ir.pairing": "ir/test_collectives planning/test_place_copies ir/test_verifier",
    "rewrites.redistribute": "tracing/test_dtensors transforms/test_update_values transforms/test_axes",
    "ir.result_types": "ir/test_verifier ir/test_operations",
    "rewrites.keep_gathers": "transforms/test_accumulate transforms/test_scaled_casts",
    "ir.emit": "ir/test_emit testing/test_check_laws",
    "ir.rewriter": "ir/test_emit transforms/test_scaled_casts transforms/test_shard_params transforms/test_accumulate",
    "ir.rules": "ir/test_verifier ir/test_collectives ir/test_copies",
    "ir.triton_launch": "tracing/test_triton_kernels",
    "ir.user_collectives": "tracing/test_c10d transforms/test_axes transforms/test_delay_weight_grads",
    "ir.user_sharding": "tracing/test_dtensors tracing/test_expert_tensor transforms/test_leaf_axes",
    "ir.varying": "ir/test_graph transforms/test_shard_params transforms/test_metrics test_errors",
    "ir.wire_format": "runtime/test_wire_format transforms/test_quantize_gathers transforms/test_quantize_grads",
    "ir.wire_traffic": "planning/test_plan_text ir/test_printer",
    "lift.hyperparameters": "lift/test_numbers lift/test_schedulers lift/test_optimizer_table",
    "lift.lifted_state": "lift/test_lifted_step lift/test_lift",
    "lift.scaler": "lift/test_gradients lift/test_loops lift/test_lift",
    "lift.shared_memory": "lift/test_module_tensors lift/test_lift",
    "planning.buffers": "planning/test_cost planning/test_one_memory_model planning/recompute/test_baseline",
    "planning.devices": "planning/test_cluster planning/test_roofline planning/test_contention",
    "planning.durations": "planning/test_cluster planning/test_published_fusion ir/test_collectives planning/test_contention",
    "planning.eager_updates": "planning/test_early_updates planning/test_updates_together planning/test_objective",
    "planning.formulate": "planning/test_skeleton planning/test_objective planning/test_one_memory_model",
    "planning.kept_arrivals": "transforms/test_offload_parameters planning/test_place_copies",
    "planning.levers": "planning/test_parts planning/test_skeleton planning/test_one_memory_model",
    "planning.make_plan": "planning/test_plan planning/test_limit transforms/test_overlap_grads",
    "planning.network": "planning/test_play planning/solver/test_solver",
    "planning.problem_memory": "planning/test_one_memory_model planning/test_lifetimes",
    "planning.realise": "planning/test_plan_edits planning/test_skeleton planning/test_parts planning/test_objective",
    "planning.recompute.absences": "planning/recompute/test_on_host planning/recompute/test_choose",
    "planning.recompute.model": "planning/recompute/test_choose transforms/test_remat_memory",
    "planning.recompute.plan_recomputation": "planning/recompute/test_on_host planning/recompute/test_choose transforms/test_remat_memory",
    "planning.recompute.residency": "planning/recompute/test_choose planning/recompute/test_on_host",
    "planning.simulate": "planning/test_play planning/test_objective planning/test_contention",
    "planning.solver.after_waits": "planning/solver/test_solver planning/test_updates_together",
    "planning.lower_bound": "report/test_timeline planning/test_objective transforms/test_across_steps",
    "planning.solver.bound": "planning/solver/test_solver planning/test_objective",
    "planning.solver.changes": "planning/test_ablations planning/solver/test_solver",
    "planning.solver.full_buckets": "planning/solver/test_solver planning/test_budgets",
    "planning.solver.loads": "planning/solver/test_solver planning/test_one_memory_model",
    "planning.solver.messages": "planning/solver/test_solver planning/test_objective",
    "planning.solver.place": "planning/solver/test_solver planning/test_updates_together",
    "planning.solver.problem": "planning/solver/test_solver planning/test_skeleton",
    "planning.solver.search": "planning/test_ablations planning/solver/test_solver planning/test_parts",
    "planning.solver.sweep": "planning/solver/test_solver planning/test_parts",
    "planning.solver.validate": "planning/solver/test_solver planning/test_plan_edits",
    "report.event": "report/test_timeline report/test_page",
    "report.figure": "report/test_timeline",
    "report.palette": "report/test_timeline report/test_page report/test_browser",
    "report.perfetto": "report/test_timeline",
    "report.table": "report/test_timeline planning/test_plan_text",
    "runtime.executable": "runtime/test_executable test_step",
    "runtime.agreement": "runtime/test_contract runtime/cuda/test_host_messages runtime/test_session runtime/test_distributed",
    "runtime.carried": "runtime/test_carried",
    "runtime.checkpoints.load": "runtime/checkpoints/test_save_and_load runtime/checkpoints/test_worlds",
    "runtime.checkpoints.save": "runtime/checkpoints/test_save_and_load runtime/checkpoints/test_worlds",
    "runtime.collectives": "runtime/test_sent_terms runtime/test_wire_format runtime/test_codegen runtime/test_distributed",
    "runtime.communicators": "runtime/cuda/test_nccl runtime/test_session",
    "runtime.cuda.copies": "runtime/cuda/test_copied_messages runtime/cuda/test_symmetric",
    "runtime.cuda.hierarchical": "runtime/cuda/test_nccl runtime/cuda/test_streams",
    "runtime.cuda.host_copies": "runtime/cuda/test_host_copies",
    "runtime.cuda.symmetric_start": "runtime/cuda/test_symmetric runtime/cuda/test_copied_messages",
    "runtime.host_copies": "transforms/test_offload runtime/cuda/test_host_copies",
    "runtime.inductor.compiler": "runtime/inductor/test_backend runtime/inductor/test_fusion",
    "runtime.mesh": "runtime/test_session runtime/cuda/test_nccl test_errors",
    "runtime.replicas": "test_step test_mistakes runtime/test_distributed",
    "runtime.runner": "runtime/cuda/test_graph_capture runtime/test_carried profiling/test_profile",
    "runtime.session": "runtime/test_session runtime/test_failure",
    "runtime.state": "test_step test_mistakes test_errors runtime/test_distributed",
    "runtime.transports": "runtime/cuda/test_symmetric runtime/cuda/test_streams runtime/test_codegen",
    "runtime.watching": "runtime/test_watch",
    "testing.laws": "testing/test_check_laws",
    "tracing.errors": "test_errors test_mistakes tracing/test_trace",
    "tracing.function_mode": "tracing/test_gradient_marks tracing/test_trace tracing/test_annotate",
    "tracing.import_fx": "tracing/test_import_fx tracing/test_higher_order",
    "tracing.functionalize": "tracing/test_one_field tracing/test_import_fx tracing/test_trace",
    "tracing.loss_scaling": "lift/test_gradients lift/test_loops",
    "tracing.recording": "tracing/test_trace calling/test_guard test_stages",
    "tracing.regions": "tracing/test_trace tracing/test_import_fx transforms/test_shard_params",
    "tracing.tensor_scalars": "lift/test_numbers tracing/test_trace tracing/test_import_fx",
    "transforms.base": "testing/test_check_laws test_errors laws/test_laws test_stages",
    "transforms.offload": "transforms/test_offload transforms/test_offload_parameters",
    "transforms.waiting_gradients": "transforms/test_offload_parameters",
    "transforms.shard_params": "transforms/test_shard_params transforms/test_metrics transforms/test_leaf_axes",
    "transforms.sharding.before_gathers": "transforms/test_scaled_casts transforms/test_fuse_cast_gather",
    "transforms.sharding.rank_values": "transforms/test_update_values transforms/test_shard_params transforms/test_metrics",
    "ir.patterns": "ir/test_rule_values ir/test_sharding_rules",
    "ir.registered_rules": "ir/test_sharding_rules tracing/test_custom_ops",
    "ir.sharding_rules": "ir/test_rule_values ir/test_sharding_rules transforms/test_update_values",
    "transforms.sharding.walk": "transforms/test_update_values transforms/test_shard_params transforms/test_whole_updates",
    "transforms.sharding.leaf_axes": "transforms/test_leaf_axes transforms/test_axes",
}


def nearest_tests(module: str) -> list[str]:
    """The examples of a module's docstrings and its test files, the nearest first, as paths from the project's root.

    >>> nearest_tests("ir.printer")
    ['ztrans/ir/printer.py', 'tests/ir/test_printer.py']
    """
    *package, name = module.split(".")
    folder = TESTS.joinpath(*package)
    listed = [TESTS / f"{test}.py" for test in NEAR.get(module, "").split()]
    own = folder / f"test_{name}.py"
    if own.exists() and own not in listed:
        listed.insert(0, own)
    if not listed:
        listed = sorted(folder.glob("test_*.py"))
    missing = [str(path) for path in listed if not path.exists()]
    if missing or not listed:
        raise ValueError(f"{module}: no nearest tests, or they are gone: {missing}")
    examples = TESTS.parent.joinpath("ztrans", *package, f"{name}.py")
    if ">>>" in examples.read_text():
        listed.insert(0, examples)
    return [str(path.relative_to(TESTS.parent)) for path in listed]
