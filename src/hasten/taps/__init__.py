"""Taps: places where hasten observes, and may change, the loaders, models and optimizers of an unmodified script.

`hasten run` starts the same Python command that the user would have typed, with `taps/site` first on PYTHONPATH. Its
`sitecustomize` starts the taps before the script's first line, in the process itself and in every Python child process
(spawned workers, torchrun's ranks). The taps import torch only once the script does.

The files of this package and what each taps while a run is recorded (doctor's observers tap more: `doctor/observe`):

    data        DataLoader.__init__, __iter__; _BaseDataLoaderIter.__next__; _DatasetKind.create_fetcher where a
                technique acts there; DataLoader._index_sampler in a trial; the same of torchdata's StatefulDataLoader
    modules     Module.__call__; torch.autograd.backward, grad
    optimizers  Optimizer.__init__, zero_grad, and torch's own hooks around step
    results     the losses of torch.nn.functional, scaled_dot_product_attention; torch.jit.script; GradScaler.scale;
                torch.save; Tensor.to, Tensor.cuda where there is a GPU
    session     sys.excepthook; os._exit if doctor bounds the run (`bounds`)
    overlay_functions  `open` and the file functions of os and shutil, in a trial (the sandbox)
    overlay_libraries  files that torch, SQLite and safetensors open in native code, in a trial
    seeds       random.seed, numpy.random.seed, torch.manual_seed in a trial

`wrapping.tap` replaces functions of torch; the replacement keeps the original as its `__wrapped__`. Taps stay in place
until the process ends.
"""
