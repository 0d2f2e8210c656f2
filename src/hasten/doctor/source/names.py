"""Read names: resolve imports, and recognize models and optimizers by how people usually name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.source.syntax import dotted

OPTIMIZERS = frozenset([
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
])  # fmt: skip
_OPTIMIZER_NAME = re.compile(
    r"(^|[._])(opt|optim|optims|optimizer|optimizers|solver)([._\d]|$)|^opt[A-Z]|optimizer", re.IGNORECASE
)
_MODEL_NAME = re.compile(
    r"(^|[._])_?(model|net|network|netG|netD|netE|generator|discriminator|criterion|loss_fn|loss_func|backbone|classifier|"
    r"policy|student|teacher|unet|vae|critic)(_\w{1,8}|\d+)?$|_(model|net|criterion|loss)$|^(criterion|loss)_\w+$"
)
# `build_model(...)` or `save_model(...)` works on a model, and is not one.
_VERB = re.compile(
    r"_?(get|build|create|make|load|save|update|fetch|un?wrap|setup|init|prepare|define|set|test|train|log|reset|push|print|calls?|names?|is|has|of)_"
)


def sounds_like_optimizer(name: str) -> bool:
    """Return whether a name is one that people give to optimizers.

    >>> sounds_like_optimizer("self.optimizer_d"), sounds_like_optimizer("options")
    (True, False)
    """
    return bool(_OPTIMIZER_NAME.search(name))


def sounds_like_model(name: str) -> bool:
    """Return whether a name is one that people give to models and loss modules.

    >>> sounds_like_model("self.netG"), sounds_like_model("network_name")
    (True, False)
    """
    return bool(_MODEL_NAME.search(name))


def sounds_like_action(name: str) -> bool:
    """Return whether a name begins with a verb, so that it is a function about models and not a model.

    >>> sounds_like_action("utils.load_model"), sounds_like_action("model")
    (True, False)
    """
    return bool(_VERB.match(name.rpartition(".")[2]))


def imports_of(nodes: Iterable[cst.CSTNode]) -> Iterator[tuple[str, str]]:
    """Yield each name that imports bind, with its full name: ("DataLoader", "torch.utils.data.DataLoader").

    Relative imports and `import *` are left out: they cannot be resolved from the file alone.
    """
    for node in nodes:
        if isinstance(node, cst.Import):
            for alias in node.names:
                full = dotted(alias.name)
                if alias.asname is not None:
                    yield dotted(alias.asname.name), full
                else:
                    yield full.split(".")[0], full.split(".")[0]
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar) and not node.relative:
            for alias in node.names:
                name = dotted(alias.name)
                yield dotted(alias.asname.name) if alias.asname else name, f"{dotted(node.module or alias)}.{name}"
