"""A memory budget for what a compiled forward keeps for its backward, with random numbers drawn once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.errors import HastenError
from hasten.techniques.compute.draws import draws
from hasten.techniques.replaced import Replaced

_SETTING, _CHOICE = "activation_memory_budget", "choose_saved_values_set"


class ActivationBudget:
    """torch's `activation_memory_budget` for all that is compiled while it is in place.

    The partitioner may choose to compute a random operator again, which would draw other numbers in the backward than
    in the forward (a dropout with another mask: a wrong gradient). Here they are kept; what is chosen is looked over,
    and where a random operator would still run again the graph keeps what it keeps without a budget.

    Args:
        budget: Share of the activations that may be kept, above 0 and below 1.
        left_alone: Told why one was not.
    """

    def __init__(self, budget: float, left_alone: Callable[[str], None]) -> None:
        # Not quite the number that was asked for, which is a part of the key of torch's cache of compiled code: a graph
        # that torch alone has made with that budget, and whose dropout is wrong, is not taken from there.
        self._budget = budget * (1 - 2.0**-30)
        self._left_alone = left_alone
        self._choice: Replaced | None = None

    def put_in_place(self, configure: Callable[[Any, str, Any], None]) -> None:
        """Set it.

        Args:
            configure: Sets a name in a module of settings to a value, and will put it back.

        Raises:
            HastenError: This torch has no such budget.
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
            self._choice = Replaced(partitioners, _CHOICE, self._change)
        self._choice.put_in_place()

    def put_back(self) -> None:
        """Leave torch's own choice in its place."""
        if self._choice is not None:
            self._choice.put_back()

    def _change(self, plain: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy

        def choose(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
            if memory_budget != self._budget:  # the script's own, for a region, or none
                return plain(joint_graph, node_info, memory_budget=memory_budget)
            drawn = [node for node in joint_graph.nodes if draws(node.target) and "recompute" not in node.meta]
            for node in drawn:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            try:
                saved = plain(joint_graph, node_info, memory_budget=memory_budget)
            finally:
                for node in drawn:
                    del node.meta["recompute"]
            if name := _drawn_again(node_info, saved):
                self._left_alone(f"a graph keeps its activations: {name} would draw random numbers a second time")
                return plain(joint_graph, node_info, memory_budget=1)
            return saved

        return choose


def _drawn_again(node_info: Any, saved: list[Any]) -> str:
    """Name a random operator of the forward that the backward would run again; "" for none."""
    kept, seen = set(saved), set()
    ahead = list(node_info.required_bw_nodes)
    while ahead:
        node = ahead.pop()
        if node in seen or node in kept:
            continue
        seen.add(node)
        if draws(node.target) and node_info.is_required_fw(node):
            return str(node.target)
        ahead += node.all_input_nodes
    return ""
