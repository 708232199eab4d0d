"""Decide which sample lies in which shard; pure, so that a plan can be made anywhere and run anywhere."""

from shard_tools.plan.layout import Plan, ShardPlan, make_plan, shuffled
from shard_tools.plan.members import (
    RESERVED,
    label_block,
    member_ext,
    sample_json,
    tar_bytes,
    value_bytes,
)

__all__ = [
    "RESERVED",
    "Plan",
    "ShardPlan",
    "label_block",
    "make_plan",
    "member_ext",
    "sample_json",
    "shuffled",
    "tar_bytes",
    "value_bytes",
]
