"""Models compiled by torch.compile."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.evidence.libraries import is_library
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.compute.activation_budget import ActivationBudget
from hasten.techniques.replaced import Replaced
from hasten.techniques.switches import Switches

KERNEL_THREADS = "HASTEN_KERNEL_THREADS"
_ON_ALL_MODULES = (
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
)


MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
_TABLE = '{mode = "default", activation_budget = 0.5}'


class Compile(Technique):
    """Compile outermost modules in place, so names in the state dict and the module's identity stay.

    A setting is a mode of torch.compile, or a table with a mode and an `activation_budget` between 0 and 1: what of the
    activations that a compiled forward keeps its backward may find there; the rest it computes again, the cheapest
    first, as torch's partitioner chooses. Less memory and more time: `hasten tune --memory SIZE` tries it last. Random
    numbers are drawn once, and kept. Compilation takes from seconds to minutes at the first step; tune
    reports it apart and weighs it against the length of the full run. A model that cannot be compiled runs on
    uncompiled under `hasten run`; in a trial it counts as a failure. Under the Trainer it compiles the modules that
    the step calls (the module itself where it says `self(x)`), not the step around them. Random numbers are those that
    the model draws uncompiled: dropout has the same masks.

    Models are called as they are in their first forward with a graph, under tracers, transforms of torch.func and
    dispatch modes, and for good where compiled code would give something else: models whose outputs depend on different
    parameters (what a step leaves out would get gradients of zero in place of none), or that may draw from a
    `random.Random` of their own, keep a `deque` of bounded length, catch errors in their forward (compiled code raises
    them elsewhere), ask whether they are compiled, or use torch's reentrant checkpoint. So are all models where the
    script's code says `create_graph=True`, and once a hook on all modules is set, the gradient of a tensor within a
    graph is asked for (`retain_grad`, a hook), or a function of `torch.autograd.functional` is called.
    """

    name = "compile"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("torch.compile tutorial", "Lin, tip 10")
    values = MODES
    acts_on = "a model"
    liveness = Liveness.LAST

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        table = setting if isinstance(setting, dict) else {"mode": setting}
        self._mode = str(table.get("mode", "default"))
        budget = float(table.get("activation_budget", 1))
        self._budget = ActivationBudget(budget, self.refused) if budget < 1 else None
        self._switches = Switches()
        self._gone = False
        self._gradients: list[Replaced] = []
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()  # to be compiled by `on`
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        # Compiled, and not called now. It holds its model: one that is dropped meanwhile stays.
        self._aside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def check(cls, setting: Setting) -> str:
        """A mode, or a table with `activation_budget`."""
        if not isinstance(setting, dict):
            wrong = super().check(setting)
            return f"{wrong}, or a table such as {_TABLE}" if wrong else ""
        if unknown := [key for key in setting if key not in ("mode", "activation_budget")]:
            return f"has no option {unknown[0]!r}; it has mode, activation_budget"
        if setting.get("mode", "default") not in MODES:
            return f"mode must be one of {', '.join(MODES)}"
        budget = setting.get("activation_budget")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < 1:
            return "activation_budget must be a number above 0 and below 1"
        return ""

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Two that decide what a backward keeps."""
        if isinstance(setting, dict) and plan.get("activation_checkpointing", False) is not False:
            return "its activation_budget and activation_checkpointing both decide what a backward keeps"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Modes that suit the device."""
        models = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
        if any(model.compiled for model in evidence.models):
            return Refusal("the script compiles its model already")
        if not models:
            return Refusal("no module's forward was seen in training")
        # A module that is a layer itself is its own only layer.
        if not any(sum(model.layers.values()) > 1 or model.name not in model.layers for model in models):
            return Refusal("the outermost modules are single layers: nothing to fuse")
        if evidence.flags.double_backward:
            return Refusal("gradients are differentiated again (create_graph=True), which compiled graphs cannot do")
        if evidence.flags.anomaly:
            return Refusal("anomaly detection is on, under which compiled graphs lose their gain; see debug_off")
        if not evidence.flags.compiler:
            return Refusal("no C++ compiler (g++ or clang++) on this machine, which torch.compile needs")
        on_gpu = any(model.device == "cuda" for model in models)
        modes: tuple[Setting, ...] = ("default", "reduce-overhead") if on_gpu else ("default",)
        return Choices(modes, "pointwise operations run one kernel each")

    def environment(self, env: dict[str, str]) -> None:
        """Keep compiled kernels where the next run finds them, those of tune's trials included."""
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())

    def process(self) -> None:
        """Under `run`, a model that cannot be compiled goes on as it is; a trial must see the failure."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())  # the Trainer starts no process of its own
        if self._budget is not None:
            self._budget.put_in_place(self._set)
        self._configure("suppress_errors", "HASTEN_TRIAL" not in os.environ)
        self._look_for_create_graph()

    def restore(self) -> None:
        """Leave compiling as configured, and torch's own ways to differentiate, to what comes later."""
        self._switches.put_back()
        if self._budget is not None:
            self._budget.put_back()
        while self._gradients:
            self._gradients.pop().put_back()

    def _leave(self, why: str) -> None:
        """Call models as they are from here on, and say so."""
        if not self._gone:
            self._gone = True
            self.let_go(f"{why}, which compiled graphs cannot do")
            self.off()

    def on(self) -> None:
        """Compile the models that are known by now; what was compiled once is called again."""
        if self._gone:
            raise HastenError("gradients are differentiated again (create_graph), which compiled graphs cannot do")
        super().on()
        self.process()
        if self._aside:
            self._look_at_all()
        for model, compiled in list(self._aside.items()):
            if model._compiled_call_impl is None:
                model._compiled_call_impl = compiled
        self._aside.clear()
        for model in list(self._models):
            self._compile(model)
        self._models.clear()

    def off(self) -> None:
        """Call models as they are."""
        super().off()
        for model in list(self._compiled):
            if (compiled := vars(model).pop("_compiled_call_impl", None)) is not None:
                self._aside[model] = compiled
        self._switches.put_back()

    def _configure(self, name: str, value: bool) -> None:
        import torch._dynamo

        self._set(torch._dynamo.config, name, value)

    def _set(self, config: Any, name: str, value: Any) -> None:
        self._switches.set(lambda: getattr(config, name), lambda value: setattr(config, name, value), value)

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Compile a module that has more than one layer."""
        if self.active:
            self._compile(model)
        else:
            self._models.add(model)

    def _compile(self, model: Any) -> None:
        import torch

        if not self._gone and (place := differentiates_again(type(model).__module__)):
            self._leave(f"gradients are differentiated again (create_graph, {place})")
        if self._gone or not any(True for _ in model.children()) or model._compiled_call_impl is not None:
            return
        if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
            return
        if any(type(layer).__name__ == "OptimizedModule" for layer in model.modules()):
            return
        from hasten.techniques.compute.untraceable import why_not_followed

        if why := why_not_followed(model):
            self.refused(why)
            return
        import torch._inductor

        # Random numbers from torch's own generator, as without compiling: else dropout draws other masks.
        self._look_at_all()
        if threading.current_thread() is not threading.main_thread():  # what `process` set holds in its thread only
            self._configure("suppress_errors", "HASTEN_TRIAL" not in os.environ)
        mode = {} if self._mode == "default" else torch._inductor.list_mode_options(self._mode)
        options: dict[str, Any] = {"options": {**mode, "fallback_random": True, "cpp.threads": _threads()}}
        if type(model).forward.__module__.startswith("torch."):
            # torch.compile passes over torch's own files: of nn.Sequential, `model.compile()` compiles nothing.
            from torch._dynamo.external_utils import wrap_inline

            model._compiled_call_impl = torch.compile(wrap_inline(model._call_impl), **options)
        else:
            model.compile(**options)
        from hasten.techniques.compute.compiled_call import CompiledCall

        held = weakref.ref(model)
        leave = functools.partial(self._leave_alone, held)
        standing = CompiledCall(model, model._compiled_call_impl, leave, self.refused)
        model._compiled_call_impl = standing
        self._compiled.add(model)
        self.did("model")

    def _leave_alone(self, held: Callable[[], Any], why: str) -> None:
        """Call one model as it is from here on."""
        model = held()
        self._compiled.discard(model)
        if vars(model).pop("_compiled_call_impl", None) is not None:
            self.acted["model"] -= 1
            if not self.acted["model"]:
                del self.acted["model"]
        self.refused(why)

    def _look_for_create_graph(self) -> None:
        """Notice what compiled code cannot do: from then on nothing is compiled. In a first step nothing is yet.

        Gradients that a library differentiates again: a later step that does fails. `torch.autograd.functional` does
        (Hessians, Jacobian-vector products), and calls the model before. Gradients at tensors inside a model
        (`retain_grad`, a hook): compiled code makes none there, or parts of them. And hooks on all modules, of which
        compiled code that is there already runs none.
        """
        import torch
        from torch._guards import TracingContext

        # `place`: where create_graph stands among the arguments; `Tensor.backward` hands it on without its name.
        def noticing(place: int, plain: Any) -> Any:
            def differentiate(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("create_graph") or (len(args) > place and args[place]):
                    self._leave("gradients are differentiated again (create_graph)")
                if plain.__name__ == "grad":
                    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
                    for tensor in inputs if isinstance(inputs, list | tuple) else (inputs,):
                        within(tensor, "torch.autograd.grad")
                return plain(*args, **kwargs)

            return differentiate

        def within(tensor: Any, how: str) -> None:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.grad_fn is not None
                and not torch.compiler.is_compiling()
                and TracingContext.try_get() is None  # torch 2.9's compiler asks so itself, and is_compiling() is False
            ):
                self._leave(f"the gradient of a tensor within a graph is asked for ({how})")

        def asking(plain: Any) -> Any:
            def ask(*args: Any, **kwargs: Any) -> Any:
                hook = args[-1] if args else None
                if not str(getattr(hook, "__module__", "")).startswith("hasten."):
                    within(args[0] if args else None, plain.__name__)
                return plain(*args, **kwargs)

            return ask

        def hooked(plain: Any) -> Any:
            def register(*args: Any, **kwargs: Any) -> Any:
                if not str(getattr(args[0] if args else None, "__module__", "")).startswith("hasten."):
                    self._leave(f"a hook on all modules is set ({plain.__name__})")
                return plain(*args, **kwargs)

            return register

        if not self._gradients:
            everywhere = torch.nn.modules.module
            self._gradients = [Replaced(torch.autograd, "grad", functools.partial(noticing, 4))]
            self._gradients.append(Replaced(torch.autograd, "backward", functools.partial(noticing, 3)))
            # Each function there begins by it, before it calls the model.
            self._gradients.append(Replaced(torch.autograd.functional, "_grad_preprocess", self._preparing))
            self._gradients += [Replaced(torch.Tensor, name, asking) for name in ("register_hook", "retain_grad")]
            self._gradients += [Replaced(everywhere, name, hooked) for name in _ON_ALL_MODULES]
            for function in self._gradients:
                function.put_in_place()

    def _preparing(self, plain: Any) -> Any:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._leave("gradients may be differentiated again (torch.autograd.functional)")
            return plain(*args, **kwargs)

        return prepare

    def _look_at_all(self) -> None:
        """Have compiled code notice what it takes for granted by default.

        Hooks set on layers after it was compiled (they would never run), NumPy's random numbers (torch's would
        stand in for them), an `assert` about a tensor (it would raise another error), and a graph that is
        differentiated again (`retain_graph=True`): its backward would have overwritten what the forward has saved. Two
        draws that look alike (`torch.randn_like(x)` twice) it takes for one, since torch's list of operators that draw
        lacks some (2.13); they get a list of all (without its search for what is computed twice, a GPT's step took 15 %
        longer). Only once something is compiled: a script's own torch.compile alone stays as it is.
        """
        import torch._functorch.compile_utils
        import torch._functorch.config

        from hasten.techniques.compute.draws import Draws

        self._configure("skip_nnmodule_hook_guards", False)
        self._configure("error_on_nested_fx_trace", False)  # nor of one that begins in another thread just now
        self._configure("use_numpy_random_stream", True)
        self._configure("rewrite_assert_with_torch_assert", False)
        self._set(torch._functorch.config, "donated_buffer", False)
        if not isinstance(listed := torch._functorch.compile_utils.rand_ops, Draws):
            self._set(torch._functorch.compile_utils, "rand_ops", Draws(listed))


def differentiates_again(home: str) -> str:
    """Return where the script's own code, or the module of this name, asks for `create_graph`; "" if nowhere.

    torch refuses the second backward of what it has compiled, when the forward is long over: so it is looked for in
    source, before. What libraries are installed is not read.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or name.startswith("torch.") or name.partition(".")[0] == "hasten":
            continue
        if (is_library(file) or is_library(os.path.realpath(file))) and name not in (home, "__main__"):
            continue
        if line := _line_of_create_graph(Path(file)):
            return f"{Path(file).name}:{line}"
    return ""


def _line_of_create_graph(file: Path) -> int:
    """Return the first line of a source file that gives `create_graph` another value than False, or 0."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # what is no Python is not called either
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)) if "create_graph" in text else ():
            if isinstance(node, ast.keyword) and node.arg == "create_graph":
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    return node.lineno
    return 0


def _threads() -> int:
    """Return for how many threads a CPU's kernels are made, which is part of their source.

    `hasten check` computes on one thread, but takes the kernels that the training has: making others takes longer than
    the whole check.
    """
    import torch

    return int(os.environ.get(KERNEL_THREADS, "0")) or torch.get_num_threads()


def _renew_pool() -> None:
    """Let a fork compile: torch's pool of threads, which a fork does not have, would be waited for without end.

    torch itself renews its pool of processes in a fork, and not that of threads.
    """
    if (module := sys.modules.get("torch._inductor.async_compile")) is not None:
        pool = module.AsyncCompile.pool
        if hasattr(pool, "cache_clear"):
            pool.cache_clear()


os.register_at_fork(after_in_child=_renew_pool)


def kernel_cache() -> str:
    """The folder in which hasten keeps compiled kernels between runs."""
    import tempfile

    return f"{tempfile.gettempdir()}/torchinductor_hasten_{os.getuid()}"


def compiler() -> str:
    """The C++ compiler that torch.compile would find, or ""."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), "")
