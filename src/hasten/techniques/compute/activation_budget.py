"""A budget for the activations that compiled code saves for its backward; random operators are never recomputed.

torch's min-cut partitioner splits the joint graph of forward and backward, and chooses which values the forward saves.
Under a budget it saves fewer and lets the backward recompute the rest. `ActivationBudget` sets the budget and wraps the
partitioner's choice, because a random operator that is recomputed draws other numbers than the forward did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.errors import HastenError
from hasten.techniques.compute.draws import draws
from hasten.techniques.replaced import ReplacedFunction

_SETTING, _CHOICE = "activation_memory_budget", "choose_saved_values_set"


class ActivationBudget:
    """torch's `activation_memory_budget`, for everything that is compiled while it is in place.

    The partitioner may choose to recompute a random operator, which would draw other numbers in the backward than in
    the forward (a dropout with another mask: a wrong gradient). Here the outputs of random operators must be saved. The
    partitioner's choice is checked afterwards: if a random operator would still run again, the graph is partitioned
    without a budget.

    Args:
        budget: Share of the activations that may be saved, above 0 and below 1.
        left_alone: Called with the reason when a graph is partitioned without the budget.
    """

    def __init__(self, budget: float, left_alone: Callable[[str], None]) -> None:
        # Slightly below the requested number. The budget is part of the key of torch's cache of compiled code, and the
        # cache may hold graphs that plain torch made with exactly that budget, whose dropout is wrong.
        self._budget = budget * (1 - 2.0**-30)
        self._left_alone = left_alone
        self._choice: ReplacedFunction | None = None

    def put_in_place(self, configure: Callable[[Any, str, Any], None]) -> None:
        """Set the budget, and wrap the partitioner's choice.

        Args:
            configure: Sets an attribute of a config module; its owner restores the attribute later.

        Raises:
            HastenError: This version of torch has no such budget.
        """
        import torch._functorch.config
        import torch._functorch.partitioners as partitioners

        config = torch._functorch.config
        if not hasattr(config, _SETTING) or not hasattr(partitioners, _CHOICE):
            raise HastenError(
                f"torch {torch.__version__} has no activation budget for compiled code",
                'write compile = "default" in the plan, or use another version of torch (2.13 has it)',
            )
        configure(config, _SETTING, self._budget)
        if self._choice is None:
            self._choice = ReplacedFunction(partitioners, _CHOICE, self._change)
        self._choice.put_in_place()

    def put_back(self) -> None:
        """Restore the partitioner's own choice. The budget is restored by whoever passed `configure`."""
        if self._choice is not None:
            self._choice.put_back()

    def _change(self, plain: Any) -> Any:
        """Wrap the partitioner's choice of the values that a forward saves."""
        from torch.utils.checkpoint import CheckpointPolicy

        def choose(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
            if memory_budget != self._budget:  # no budget, or the script's own budget for a region
                return plain(joint_graph, node_info, memory_budget=memory_budget)
            # Nodes that carry a policy already, from the script's activation checkpointing, keep it.
            random_nodes = [node for node in joint_graph.nodes if draws(node.target) and "recompute" not in node.meta]
            for node in random_nodes:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            try:
                saved = plain(joint_graph, node_info, memory_budget=memory_budget)
            finally:
                for node in random_nodes:
                    del node.meta["recompute"]
            # Versions of torch may ignore the policy, or choose past it: so the choice itself is checked.
            if name := _recomputed_draw(node_info, saved):
                self._left_alone(f"a graph keeps its activations: {name} would draw random numbers a second time")
                return plain(joint_graph, node_info, memory_budget=1)
            return saved

        return choose


def _recomputed_draw(node_info: Any, saved: list[Any]) -> str:
    """Return the name of a random operator of the forward that the backward would run again; "" if there is none."""
    saved_nodes, visited = set(saved), set()
    queue = list(node_info.required_bw_nodes)  # walk from the backward's nodes to inputs; saved values end the walk
    while queue:
        node = queue.pop()
        if node in visited or node in saved_nodes:
            continue
        visited.add(node)
        if draws(node.target) and node_info.is_required_fw(node):
            return str(node.target)
        queue += node.all_input_nodes
    return ""
