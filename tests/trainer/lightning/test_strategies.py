"""Lightning's strategy objects become hasten's; options without a counterpart are refused, not dropped."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecision

import hasten
from hasten import strategies
from tests.trainer.trainings import quiet

lightning = pytest.importorskip("lightning.pytorch.strategies")
DDPStrategy, FSDPStrategy = lightning.DDPStrategy, lightning.FSDPStrategy
SingleDeviceStrategy = lightning.SingleDeviceStrategy
Block = torch.nn.TransformerEncoderLayer


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (SingleDeviceStrategy(), "auto"),
        (DDPStrategy(), strategies.DDPStrategy()),
        (DDPStrategy(start_method="fork"), strategies.DDPStrategy(start="ddp_fork")),
        (
            DDPStrategy(static_graph=True, find_unused_parameters=True, gradient_as_bucket_view=False),
            strategies.DDPStrategy(static_graph=True, find_unused_parameters=True, gradient_as_bucket_view=False),
        ),
        (
            DDPStrategy(ddp_comm_hook=bf16_compress_hook),
            strategies.DDPStrategy(ddp_comm_hook=bf16_compress_hook),
        ),
        (FSDPStrategy(), strategies.FSDPStrategy()),
        (
            FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="SHARD_GRAD_OP"),
            strategies.FSDPStrategy(blocks=[Block], reshard_after_forward=False),
        ),
    ],
)
def test_options_that_hasten_has_are_taken_over(given, becomes):
    found = quiet(strategy=given).config.strategy
    assert found.name == becomes if isinstance(becomes, str) else found == becomes


def test_mixed_precision_becomes_the_policy_of_fsdp2():
    given = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = quiet(strategy=FSDPStrategy(mixed_precision=given)).config.strategy.mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (DDPStrategy(broadcast_buffers=False), "broadcast_buffers"),
        (DDPStrategy(model_averaging_period=3), "model_averaging_period"),
        (FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 1)), "sharding_strategy"),
        (FSDPStrategy(cpu_offload=True), "cpu_offload"),
        (FSDPStrategy(activation_checkpointing_policy={Block}), "activation_checkpointing"),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(given, said):
    with pytest.raises(hasten.HastenError, match=said):
        quiet(strategy=given)


def test_strategies_that_hasten_has_not_are_refused():
    with pytest.raises(hasten.HastenError, match="none of hasten's"):
        quiet(strategy=type("ModelParallelStrategy", (), {})())
