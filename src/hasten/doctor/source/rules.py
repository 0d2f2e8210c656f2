"""All rules of source code."""

from __future__ import annotations

from hasten.doctor.source.graphs import RetainedGraph, ValidationGraphs
from hasten.doctor.source.loaders import PageableMemory, WorkersRecreated, WorkersZero
from hasten.doctor.source.models import AttentionByHand, BiasBeforeNorm
from hasten.doctor.source.optimizers import (
    AdamWithL2,
    ConstantRate,
    NoGradientClipping,
    PerTensorOptimizer,
    ZeroedGradients,
)
from hasten.doctor.source.parallel import AccumulationSyncs, DataParallel, UnusedParameters
from hasten.doctor.source.rule import Rule
from hasten.doctor.source.syncs import CacheEmptied, DebugToolsOn, GarbageCollected, HostSync, SynchronizeInLoop
from hasten.doctor.source.tensors import BlockingCopy, MovedFromCpu, TensorCopy, UnsafeLoad

RULES: tuple[type[Rule], ...] = (
    RetainedGraph, ValidationGraphs, HostSync, SynchronizeInLoop, CacheEmptied, GarbageCollected, DebugToolsOn,
    WorkersZero, WorkersRecreated, PageableMemory, BlockingCopy, MovedFromCpu, TensorCopy, BiasBeforeNorm,
    AttentionByHand, ZeroedGradients, PerTensorOptimizer, DataParallel, UnusedParameters, AccumulationSyncs,
    AdamWithL2, NoGradientClipping, ConstantRate, UnsafeLoad,
)  # fmt: skip
NAMES = tuple(rule.name for rule in RULES)
