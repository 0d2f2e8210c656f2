"""Compile a script's models with torch.compile, and stay out of the way where compiled code would behave differently.

`Compile.model` compiles a module in place and puts a `CompiledCall` around the result, which decides call by call. What
compiled graphs cannot do is looked for in source (`create_graph=True`) and noticed by wrapped functions of torch
(hooks, double backward); from then on every model runs uncompiled. A few of torch's compiler settings are changed once
something is compiled, since their defaults would change results; all are restored by `restore`.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.compute.activation_budget import ActivationBudget
from hasten.techniques.compute.double_backward import differentiates_again
from hasten.techniques.replaced import ReplacedFunction
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
    """Compile outermost modules in place: the modules stay the same objects, with the same names in the state dict.

    A setting is a mode of torch.compile, or a table with a mode and an `activation_budget` between 0 and 1: the share
    of a compiled forward's activations that are saved for its backward. The backward recomputes the rest, the cheapest
    first, as torch's partitioner chooses. This takes less memory and more time: `hasten tune --memory SIZE` tries it
    last. Random numbers are drawn once, and saved. Compilation takes from seconds to minutes at the first step; tune
    reports it separately and weighs it against the length of the full run. A model that cannot be compiled runs
    uncompiled under `hasten run`; in a trial it counts as a failure. Under the Trainer, the modules that the step calls
    are compiled (the module itself if it calls `self(x)`), not the step around them. Random numbers are the same as
    uncompiled: dropout has the same masks.

    A model runs uncompiled in its first forward with a graph, and under tracers, transforms of torch.func and dispatch
    modes. It runs uncompiled for good where compiled code would give other results: if its outputs depend on different
    parameters (those of an unused output would get gradients of zero instead of none), or if it may draw from its own
    `random.Random`, holds a `deque` of bounded length, catches errors in its forward (compiled code raises them
    elsewhere), asks whether it is compiled, or uses torch's reentrant checkpoint. All models run uncompiled if the
    script's code says `create_graph=True`, and as soon as a hook on all modules is set, the gradient of a tensor within
    a graph is requested (`retain_grad`, a hook), or a function of `torch.autograd.functional` is called.
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
        self._given_up = False
        self._gradients: list[ReplacedFunction] = []
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()  # to be compiled by `on`
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        # Model -> its compiled call, while `off` has taken it out. The call refers to its model, so the model lives on.
        self._aside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting, which must be a mode or a table with `activation_budget`."""
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
        """Refuse an activation budget beside `activation_checkpointing`."""
        if isinstance(setting, dict) and plan.get("activation_checkpointing", False) is not False:
            return "its activation_budget and activation_checkpointing both decide what a backward keeps"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose the modes that suit the device, if the script's models can be compiled and gain from it."""
        models = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
        if any(model.compiled for model in evidence.models):
            return Refusal("the script compiles its model already")
        if not models:
            return Refusal("no module's forward was seen in training")
        # For a script that calls a bare layer (`nn.Linear`), `layers` holds that layer alone, under the model's name.
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
        """Keep compiled kernels in a folder that later runs, and tune's trials, share."""
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())

    def process(self) -> None:
        """Configure the compiler. Under `run`, a failed compilation falls back to eager; in a trial it must raise."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())  # the Trainer never calls `environment`
        if self._budget is not None:
            self._budget.put_in_place(self._set)
        self._configure("suppress_errors", "HASTEN_TRIAL" not in os.environ)
        self._look_for_create_graph()

    def restore(self) -> None:
        """Restore the compiler's settings and torch's own functions."""
        self._switches.put_back()
        if self._budget is not None:
            self._budget.put_back()
        while self._gradients:
            self._gradients.pop().put_back()

    def _leave(self, why: str) -> None:
        """Run all models uncompiled from here on, and tell the user."""
        if not self._given_up:
            self._given_up = True
            self.gave_up(f"{why}, which compiled graphs cannot do")
            self.off()

    def on(self) -> None:
        """Compile the models known so far, and put back compiled calls that `off` took out."""
        if self._given_up:
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
        """Run models uncompiled, and keep their compiled calls for `on`."""
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
        """Compile a module that has more than one layer, now or when the technique is switched on."""
        if self.active:
            self._compile(model)
        else:
            self._models.add(model)

    def _compile(self, model: Any) -> None:
        """Compile one module, unless the script has compiled it or compiled code would behave differently."""
        import torch

        if not self._given_up and (place := differentiates_again(type(model).__module__)):
            self._leave(f"gradients are differentiated again (create_graph, {place})")
        if self._given_up or not any(True for _ in model.children()) or model._compiled_call_impl is not None:
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

        # fallback_random: draw from torch's own generator, as uncompiled code does. Inductor's own random numbers would
        # give dropout other masks.
        self._look_at_all()
        if threading.current_thread() is not threading.main_thread():  # `process` has set this for its own thread only
            self._configure("suppress_errors", "HASTEN_TRIAL" not in os.environ)
        mode = {} if self._mode == "default" else torch._inductor.list_mode_options(self._mode)
        options: dict[str, Any] = {"options": {**mode, "fallback_random": True, "cpp.threads": _threads()}}
        if type(model).forward.__module__.startswith("torch."):
            # torch.compile skips torch's own files, so `nn.Sequential.compile()` would compile nothing.
            from torch._dynamo.external_utils import wrap_inline

            model._compiled_call_impl = torch.compile(wrap_inline(model._call_impl), **options)
        else:
            model.compile(**options)
        from hasten.techniques.compute.compiled_call import CompiledCall

        leave_alone = functools.partial(self._leave_alone, weakref.ref(model))
        model._compiled_call_impl = CompiledCall(model, model._compiled_call_impl, leave_alone, self.refused)
        self._compiled.add(model)
        self.did("model")

    def _leave_alone(self, model_ref: Callable[[], Any], why: str) -> None:
        """Run one model uncompiled from here on."""
        model = model_ref()
        self._compiled.discard(model)
        if vars(model).pop("_compiled_call_impl", None) is not None:
            self.acted["model"] -= 1
            if not self.acted["model"]:
                del self.acted["model"]
        self.refused(why)

    def _look_for_create_graph(self) -> None:
        """Watch for requests that compiled code cannot serve. The first gives up compiling, for all models.

        The first step runs uncompiled, so a request in it is noticed in time. Watched are double backward
        (`create_graph`, in libraries too), which would fail later; `torch.autograd.functional` (Hessians), which does
        the same after it called the model; gradients inside a model (`retain_grad`, a hook), of which compiled code
        makes none, or parts; and hooks on all modules, which code that is compiled already does not run.
        """
        import torch
        from torch._guards import TracingContext

        # `place`: position of create_graph among the arguments, since `Tensor.backward` passes it by position.
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
                # torch 2.9's compiler requests such gradients itself while it traces, with is_compiling() False.
                and TracingContext.try_get() is None
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
            self._gradients = [ReplacedFunction(torch.autograd, "grad", functools.partial(noticing, 4))]
            self._gradients.append(ReplacedFunction(torch.autograd, "backward", functools.partial(noticing, 3)))
            # Each function of torch.autograd.functional calls this before it calls the model.
            self._gradients.append(ReplacedFunction(torch.autograd.functional, "_grad_preprocess", self._preparing))
            for name in ("register_hook", "retain_grad"):
                self._gradients.append(ReplacedFunction(torch.Tensor, name, asking))
            self._gradients += [ReplacedFunction(torch.nn.modules.module, name, hooked) for name in _ON_ALL_MODULES]
            for function in self._gradients:
                function.put_in_place()

    def _preparing(self, plain: Any) -> Any:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._leave("gradients may be differentiated again (torch.autograd.functional)")
            return plain(*args, **kwargs)

        return prepare

    def _look_at_all(self) -> None:
        """Change the compiler's settings whose defaults would change results. Called once something is compiled.

        By default, hooks set on a layer after its compilation never run, torch's random numbers replace NumPy's, a
        failing `assert` about a tensor raises another error, and the backward overwrites the activations that the
        forward saved, though a graph may be differentiated again (`retain_graph=True`). Also, two draws that look alike
        (two times `torch.randn_like(x)`) are merged into one, because torch's list of random operators lacks some
        (2.13): it is replaced by `RandomOperators`, which has all. (To switch off the search for common subexpressions
        instead made a GPT's step 15 % slower.) A script that only uses torch.compile itself keeps the defaults.
        """
        import torch._functorch.compile_utils
        import torch._functorch.config

        from hasten.techniques.compute.draws import RandomOperators

        self._configure("skip_nnmodule_hook_guards", False)
        self._configure("error_on_nested_fx_trace", False)  # the trace may be another thread's
        self._configure("use_numpy_random_stream", True)
        self._configure("rewrite_assert_with_torch_assert", False)
        self._set(torch._functorch.config, "donated_buffer", False)
        if not isinstance(listed := torch._functorch.compile_utils.rand_ops, RandomOperators):
            self._set(torch._functorch.compile_utils, "rand_ops", RandomOperators(listed))


def _threads() -> int:
    """Return the number of threads that CPU kernels are compiled for; it is part of their source.

    `hasten check` computes on one thread but reuses the training's kernels, because compiling others would take longer
    than the whole check.
    """
    import torch

    return int(os.environ.get(KERNEL_THREADS, "0")) or torch.get_num_threads()


def _renew_pool() -> None:
    """Drop torch's cached thread pool in a forked child: its threads do not exist there, so compiling would hang.

    torch itself renews its pool of processes in a fork, but not its pool of threads.
    """
    if (module := sys.modules.get("torch._inductor.async_compile")) is not None:
        pool = module.AsyncCompile.pool
        if hasattr(pool, "cache_clear"):
            pool.cache_clear()


os.register_at_fork(after_in_child=_renew_pool)


def kernel_cache() -> str:
    """Return the folder in which hasten keeps compiled kernels between runs."""
    import tempfile

    return f"{tempfile.gettempdir()}/torchinductor_hasten_{os.getuid()}"


def compiler() -> str:
    """Return the path of the C++ compiler that torch.compile would find; "" if there is none."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), "")
